"""Making GPTQ quants: the grid, the solver, the files."""
