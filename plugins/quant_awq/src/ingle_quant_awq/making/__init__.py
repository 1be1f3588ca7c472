"""Making AWQ quants: scale search, clip search, folding, files."""
