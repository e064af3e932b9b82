"""A device that is not there, and an executor without a model: serving on a virtual clock."""
