"""What will be applied, as plain data: recipes, and how the arguments of `MemSave` change them."""
