"""Operations of reductions, predefined and of the program."""
