"""The pages of docs/papers/ against the recipes: every row and point, and every setting."""
