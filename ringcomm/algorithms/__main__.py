"""Print docs/algorithms.md: `python -m ringcomm.algorithms > docs/algorithms.md`."""

from ringcomm.algorithms.page import page

print(page(), end="")
