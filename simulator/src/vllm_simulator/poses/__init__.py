"""One module for each vendor whose torch modules are posed as."""
