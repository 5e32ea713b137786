"""Training, fine-tuning and probing: data, augmentation, the loop, checkpoints, reports, recipes.

    from pathlib import Path
    from vitkern.train import recipes
    from vitkern.train.run import train
    result = train(recipes.settings("digits"), Path("runs"))

`vitkern train` and `vitkern probe` are the same on the command line. Needs the extra `[train]`.
"""
