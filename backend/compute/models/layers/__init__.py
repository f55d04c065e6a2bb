"""One module for each kind of layer. A family composes them."""
