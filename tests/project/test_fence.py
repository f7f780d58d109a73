"""A release store does not order non-temporal stores before it, and no sanitizer sees that: look at the machine code.

Every path from a non-temporal store to the end of its function must contain an sfence.
"""

import platform
import re
import shutil
import subprocess
from itertools import pairwise

import pytest

from ringcomm import _native

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 has movnt"),
    pytest.mark.skipif(not shutil.which("objdump"), reason="no objdump"),
]

FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
INSTRUCTION = re.compile(r"^ *([0-9a-f]+):\t(.+)$")
JUMP = re.compile(r"^(?:notrack |bnd )?(j\w+) +([0-9a-f]+) ")
STREAM = re.compile(r"^v?movnt(?!dqa)")  # movntdqa loads

FENCED = """
0000000000001000 <good>:
    1000:\tmovntps %xmm0,(%rdi)
    1003:\tjne    1000 <good>
    1005:\tsfence
    1008:\tret
"""
UNFENCED = """
0000000000001000 <bad>:
    1000:\ttest   %rdi,%rdi
    1003:\tmovntps %xmm0,(%rdi)
    1006:\tje     100b <bad+0xb>
    1008:\tsfence
    100b:\tret
"""


def test_every_streaming_function_ends_with_a_fence():
    command = ["objdump", "--disassemble", "--no-show-raw-insn", _native.__file__]
    functions = parse(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    streaming = {name for name, code in functions.items() if any(map(STREAM.match, code.values()))}
    assert streaming, "no function with non-temporal stores found: was the library stripped?"
    assert not {name for name in streaming if leaks(functions[name])}


def test_a_missing_fence_is_detected():
    assert not leaks(parse(FENCED)["good"])
    assert leaks(parse(UNFENCED)["bad"])


def parse(listing):
    """Return {function: {address: instruction}}."""
    functions = {}
    code = {}
    for line in listing.splitlines():
        if match := FUNCTION.match(line):
            code = functions.setdefault(match[1], {})
        elif match := INSTRUCTION.match(line):
            code[int(match[1], 16)] = match[2].strip()
    return functions


def leaks(code):
    """Return whether a path leads from a non-temporal store out of the function without a fence."""
    addresses = sorted(code)
    following = dict(pairwise(addresses))
    seen = set()
    todo = [following.get(address) for address in addresses if STREAM.match(code[address])]
    while todo:
        address = todo.pop()
        if address not in code or code[address].startswith("ret"):
            return True  # left the function
        if address in seen or code[address].startswith("sfence"):
            continue
        seen.add(address)
        jump = JUMP.match(code[address])
        if jump:
            todo.append(int(jump[2], 16))
        if not jump or jump[1] != "jmp":
            todo.append(following.get(address))
    return False
