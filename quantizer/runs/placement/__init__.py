"""Plans by measured time: what each group takes, and the speed that an engine has to reach."""
