"""One word, one meaning: names use the terms of docs/architecture.md, *Words*, and no second word for a thing."""

import ast
import re
from collections import Counter

from test_layers import MODULES, ROOT, native_sources

# Words for which names have another one, that of the table where it has one.
REPLACED = {
    "climb": "import, include",
    "cure": "hint",
    "departed": "detached",
    "gone": "lost",
    "newcomer": "joiner",
    "respawn": "restart",
    "vain": "expired",
}
# Terms of which the table lists several senses, or kinds.
SHARED = {"context", "layout", "member", "record"}
NATIVE_CLASS = r"(?m)^ *(?:class|struct) (\w+)(?: final)?(?: : [^;]*)? \{"
NATIVE_NAME = (
    r"\b(?:class|struct|enum|enum class|void|bool|int|auto|\w+_t|[A-Z]\w+|std::[\w:<>]+)[&*]* (\w+)"
    r"(?=\(| \{| :|;| = |\{|,)"
)
NATIVE_MEMBER = r"\b[a-z]\w*_\b"  # its name ends with an underscore


def test_no_term_is_defined_twice():
    terms = Counter(defined_terms())
    assert [term for term, count in terms.items() if count > 1] == []


def test_a_class_that_is_called_by_a_term_of_several_senses_is_in_the_table():
    listed = {*defined_terms(), *re.findall(r"`(\w+)`", table())}
    unlisted = {
        name: place
        for place, name in (*python_classes(), *native_classes())
        if in_words(name).split()[-1] in SHARED and listed.isdisjoint({name, in_words(name)})
    }
    assert unlisted == {}


def test_names_have_no_second_word_for_a_thing():
    names = {name: place for place, name in (*python_names(), *native_names())}
    assert {"Communicator", "all_reduce", "flight", "FlightRecord", "on_spin_expired", "idle_ns_"} <= set(names)
    found = {name: (place, REPLACED[word]) for name, place in names.items() for word in words(name) & set(REPLACED)}
    assert found == {}


def table():
    return re.search(r"## Words\n(.*?)\n## ", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)[1]


def defined_terms():
    return [term for row in re.findall(r"^\| ([^|]+) \|", table(), re.MULTILINE) for term in row.split(", ")]


def python_classes():
    for module, path in MODULES.items():
        yield from (
            (module, node.name) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
        )


def native_classes():
    """Yield those of ringcomm; the emulated driver has the words of CUDA."""
    for source in native_sources():
        if "emulated_cuda" not in source.parts:
            yield from ((source, name) for name in re.findall(NATIVE_CLASS, source.read_text()))


def python_names():
    """Yield (module, name) of every module, class, function, method, argument and field."""
    for module, path in MODULES.items():
        yield from ((module, part) for part in module.split("."))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                yield module, node.name
            elif isinstance(node, ast.arg):
                yield module, node.arg
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield module, node.target.id


def native_names():
    """Yield (file, name) of every file, type, function and member, and of most variables."""
    for source in native_sources():
        yield source, source.stem
        for pattern in (NATIVE_NAME, NATIVE_MEMBER):
            yield from ((source, name) for name in re.findall(pattern, source.read_text()))


def words(name):
    return {*in_words(name).split()}


def in_words(name):
    return " ".join(word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name))
