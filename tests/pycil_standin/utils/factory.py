def get_model(model_name, args):
    name = model_name.lower()
    if name == "replay":
        from models.replay import Replay

        return Replay(args)
    elif name == "bic":
        from models.bic import BiC

        return BiC(args)
    elif name in ("mixture", "beefiso", "der", "foster", "memo", "rmm-foster", "tagfex"):  # expanding networks
        from models.mixture import Mixture

        return Mixture(args)
    elif name == "simplecil":
        from models.simplecil import SimpleCIL

        return SimpleCIL(args)
    elif name == "gem":
        from models.gem import GEM

        return GEM(args)
    else:
        assert 0
