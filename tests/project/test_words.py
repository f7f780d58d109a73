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
NATIVE_NAME = (
    r"\b(?:class|struct|enum|enum class|void|bool|int|auto|\w+_t|[A-Z]\w+|std::[\w:<>]+)[&*]* (\w+)"
    r"(?=\(| \{| :|;| = |\{|,)"
)
NATIVE_MEMBER = r"\b[a-z]\w*_\b"  # its name ends with an underscore


def test_no_term_is_defined_twice():
    section = re.search(r"## Words\n(.*?)\n## ", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)[1]
    terms = Counter(term for row in re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE) for term in row.split(", "))
    assert [term for term, count in terms.items() if count > 1] == []


def test_names_have_no_second_word_for_a_thing():
    names = {name: place for place, name in (*python_names(), *native_names())}
    assert {"Communicator", "all_reduce", "flight", "FlightRecord", "on_spin_expired", "idle_ns_"} <= set(names)
    found = {name: (place, REPLACED[word]) for name, place in names.items() for word in words(name) & set(REPLACED)}
    assert found == {}


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
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}
