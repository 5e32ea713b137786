"""Training, fine-tuning and probing: data, augmentation, the loop, checkpoints, reports, recipes.

    from vitkern.train import recipes
    from vitkern.train.run import train
    result = train(recipes.settings("digits"))

`vitkern train` and `vitkern probe` are the same on the command line. Needs the extra `[train]`.
"""
