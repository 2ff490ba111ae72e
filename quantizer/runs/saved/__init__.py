"""The saved folder of a run, the next morning: how its model is called, and the engine that is called so."""
