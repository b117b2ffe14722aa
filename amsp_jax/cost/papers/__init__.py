"""The papers' own formulas, by name, in their own conventions; nothing of the engine depends on them."""
