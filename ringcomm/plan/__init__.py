"""`ringcomm plan`: which layout trains a GPT fastest on a cluster, and where its time and memory go.

`model` and `layout` say what is trained and how it is divided, `devices` on what. `price` prices a layout,
`search` all of them; `fit` and `measure` find the constants of a device. The formulas and their papers are in
docs/plan.md. Only `measure` needs torch.
"""
