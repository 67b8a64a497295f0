"""L2P, DualPrompt, CODA-Prompt: prompts by each image's own features, against slow references; as PILOT's code."""

import pytest
import torch
from reference import prompts as twin
from reference import tuning
from support.small_runs import SETTINGS, batch_of, small_data, suited

pytest.importorskip("timm")
from pycil_wsc.config.loading import resolve  # noqa: E402
from pycil_wsc.errors import UserError  # noqa: E402
from pycil_wsc.launch.attempt import Datasets  # noqa: E402
from pycil_wsc.networks.tuning.pools import PromptPool, orthogonal  # noqa: E402
from pycil_wsc.runs.run import Run  # noqa: E402
from pycil_wsc.training.learner import grow_for
from pycil_wsc.training.phase import PhaseRun  # noqa: E402
from pycil_wsc.training.step.cost import Operations  # noqa: E402

HEADS = 2
SIMPLER = {"precision": "fp32", "memory_per_class": 0, "size": 4, "length": 2, "top_k": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name, tasks, keys -> a learner that has begun its ``tasks``-th task, with weights that are not small."""
    data = small_data(tmp_path_factory.mktemp("prompts") / "data.npz", per_class=4)

    def make(name, tasks=2, **keys):
        own = {key: value for key, value in SIMPLER.items() if name != "coda_prompt" or key not in ("size", "length")}
        own = {key: value for key, value in own.items() if name != "coda_prompt" or key != "top_k"}
        config = resolve(SETTINGS | {"dataset": f"npz:{data}", "model_name": name} | suited(name) | own | keys)
        learner = Run(config, Datasets().of(config)).learner
        generator = torch.Generator().manual_seed(1)
        for task in learner.manager.tasks[:tasks]:
            grow_for(learner, task)
        for parameter in learner.network.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
        learner.begin_task(task)
        return learner.eval()

    return make


def batch(learner, count=5):
    """Random images of the two newest classes."""
    images = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    newest = learner.network.head.out_features
    return batch_of(images, torch.arange(count) % 2 + newest - 2)


def queries(learner, images):
    weights = dict(learner.network.backbone.vit.named_parameters())
    return weights, [tuning.features(weights, HEADS, image).detach() for image in images]


def expected_loss(learner, features, targets, first):
    head = learner.network.head
    logits = [head.weight @ each + head.bias for each in features]
    errors = [twin.cross_entropy(each[first:], target - first) for each, target in zip(logits, targets.tolist())]
    return torch.stack(logits), sum(errors) / len(errors)


def assert_same(learner, given, logits, loss):
    """Losses, logits and all gradients are those of the reference."""
    ours, our_logits = learner.loss(given)
    torch.testing.assert_close(our_logits, logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours, loss, rtol=1e-4, atol=1e-5)
    trained = [parameter for parameter in learner.network.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(ours, trained, allow_unused=True)
    wanted = torch.autograd.grad(loss, trained, allow_unused=True)
    assert any(each is not None for each in wanted)
    for mine, other in zip(found, wanted, strict=True):
        if other is not None or (mine is not None and mine.any()):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("vote", [True, False])
def test_l2ps_images_get_the_prompts_of_the_nearest_keys_or_those_that_most_choose(vote, made):
    learner = made("l2p", batchwise_prompt=vote, head_type="prompt")
    given = batch(learner)
    pool = learner.network.prompts
    weights, asked = queries(learner, given.images)
    own = [twin.nearest(pool.keys, query, 2) for query in asked]
    chosen = [twin.elected(own, 2)] * len(own) if vote else own
    features = [
        twin.l2p_features(weights, HEADS, image, pool.prompts[numbers].flatten(0, 1))
        for image, numbers in zip(given.images, chosen)
    ]
    logits, loss = expected_loss(learner, features, given.targets, first=2)
    pulls = [twin.pull(pool.keys, query, numbers) for query, numbers in zip(asked, chosen)]
    assert_same(learner, given, logits, loss - 0.1 * sum(pulls) / len(pulls))
    alone = [
        twin.l2p_features(weights, HEADS, image, pool.prompts[n].flatten(0, 1)) for image, n in zip(given.images, own)
    ]
    with torch.no_grad():
        torch.testing.assert_close(learner.extract(given.images), torch.stack(alone), rtol=1e-4, atol=1e-5)


def test_a_task_of_dualprompt_has_its_own_keys_and_values_in_training_and_the_nearest_in_a_test(made):
    learner = made("dualprompt", top_k=1)
    given, net = batch(learner), learner.network
    weights, asked = queries(learner, given.images)

    def features(image, number):
        own = net.prompts.prompts[number].unflatten(0, net.per_prompt)[0]  # of block 1: keys, values
        shared = net.general  # of block 0
        pairs = twin.prefixes_of({0: (shared[0], shared[1]), 1: (own[0], own[1])})
        return tuning.features(weights, HEADS, image, prefixes=pairs)

    logits, loss = expected_loss(learner, [features(image, 1) for image in given.images], given.targets, first=2)
    pulls = [twin.pull(net.prompts.keys, query, [1]) for query in asked]
    assert_same(learner, given, logits, loss - 0.1 * sum(pulls) / len(pulls))
    nearest = [twin.nearest(net.prompts.keys, query, 1)[0] for query in asked]
    with torch.no_grad():
        expected = torch.stack([features(image, number) for image, number in zip(given.images, nearest)])
        torch.testing.assert_close(learner.extract(given.images), expected, rtol=1e-4, atol=1e-5)


def test_dualprompts_halves_are_those_of_pilots_reshape(made):
    learner = made("dualprompt", top_k=1, prompts_by_halves=True)
    given, net = batch(learner, count=4), learner.network
    weights, _ = queries(learner, given.images)
    own = net.prompts.prompts[1].unflatten(0, net.per_prompt)[0]
    with torch.no_grad():
        found = net.with_prompts(given.images, torch.ones(4, 1, dtype=torch.int64))
        for index, image in enumerate(given.images):
            both = own[0] if index < 2 else own[1]
            pairs = twin.prefixes_of({0: (net.general[0], net.general[1]), 1: (both, both)})
            expected = tuning.features(weights, HEADS, image, prefixes=pairs)
            torch.testing.assert_close(found[index], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weight", [0, 0.5])
def test_codas_prompts_are_components_weighted_by_the_images_attention(weight, made):
    learner = made("coda_prompt", prompt_param=[6, 4, weight])
    given, net = batch(learner), learner.network
    weights, asked = queries(learner, given.images)
    parts = [part._trained() for part in net.components]  # earlier tasks' components are constants
    features = []
    for image, query in zip(given.images, asked):
        prompts = [twin.coda_prompt(query, *part) for part in parts]
        pairs = twin.prefixes_of({index: (prompt[:2], prompt[2:]) for index, prompt in enumerate(prompts)})
        features.append(tuning.features(weights, HEADS, image, prefixes=pairs))
    logits, loss = expected_loss(learner, features, given.targets, first=2)
    for rows in (rows.flatten(1) for part in parts for rows in part):
        loss = loss + weight * ((rows @ rows.T - torch.eye(len(rows))) ** 2).mean()
    assert_same(learner, given, logits, loss)
    learner.loss(given)[0].backward()
    gradient = net.components[0].keys.grad
    assert not gradient[:2].any() and gradient[2:].all(), "two components of each of three tasks"


def test_codas_new_components_are_orthonormal_and_orthogonal_to_all_before():
    torch.manual_seed(0)
    before = torch.linalg.qr(torch.randn(9, 3)).Q.T * torch.tensor([[1.0], [2.0], [0.5]])
    new = orthogonal(before, 4)
    torch.testing.assert_close(new @ new.T, torch.eye(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(new @ before.T, torch.zeros(4, 3), atol=1e-5, rtol=0)


def test_codas_rate_is_that_of_its_code_one_epoch_late(made):
    learner = made("coda_prompt", tasks=1, init_epoch=5)
    (phase,) = learner.phases(learner.manager.tasks[0])
    assert [phase.lr(epoch) for epoch in range(5)] == pytest.approx(twin.coda_rates(learner.config.init_lr, 5))
    one = made("coda_prompt", tasks=1, init_epoch=1)
    (phase,) = one.phases(one.manager.tasks[0])
    assert phase.lr(0) == one.config.init_lr


@pytest.mark.parametrize("name", ["l2p", "dualprompt", "coda_prompt"])
@torch.no_grad()
def test_a_prediction_does_not_depend_on_the_other_images_unless_asked_for(name, made):
    learner = made(name)
    images = batch(learner, count=9).images
    together = learner.predict(images)
    alone = torch.cat([learner.predict(image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    if name != "coda_prompt":
        voting = made(name, batchwise_test=True)
        assert (voting.predict(images) - alone).abs().max() > 1e-3


def test_ties_of_votes_are_broken_as_in_pilot():
    """Among those that are chosen, in ascending order, as torch.topk does."""
    pool = PromptPool(6, (1, 4), 4, 2)
    for rows in ([[5, 1], [1, 4], [4, 5]], [[3, 2], [2, 5], [0, 3]], [[0, 1], [2, 3]]):
        best = torch.tensor(rows)
        numbers, counts = torch.unique(best, return_counts=True, sorted=True)
        missing = 6 - len(numbers)
        counts = torch.cat([counts, torch.zeros(missing, dtype=counts.dtype)])
        expected = numbers[counts.topk(2).indices]
        assert pool._most_chosen(best, lambda votes: votes)[0].tolist() == expected.tolist()


def test_with_exemplars_all_classes_are_told_apart(made):
    learner = made("l2p", memory_per_class=2)
    tasks = learner.manager.tasks
    learner._choose_exemplars(tasks[0])
    learner.begin_task(tasks[1])
    given = batch_of(batch(learner).images, torch.tensor([0, 1, 2, 3, 0]))
    loss, logits = learner.loss(given)
    similarity = learner.network.prompts.similarity(learner.network.queries(given.images))
    chosen = learner.network.prompts.chosen(similarity, lambda votes: votes)
    pull = similarity.gather(1, chosen).sum(1).mean()
    expected = torch.nn.functional.cross_entropy(logits, given.targets) - 0.1 * pull
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("name", ["l2p", "dualprompt", "coda_prompt"])
def test_a_step_counts_the_query_pass_and_images_that_stay_the_same_are_asked_once(name, made):
    keys = {"prompt_param": [6, 4, 0]} if name == "coda_prompt" else {}  # the penalty's cost is one per batch
    learner = made(name, **keys)
    task, given = learner.manager.tasks[1], batch(learner)
    with Operations() as of_query:
        learner.network.queries(given.images)
    (phase,) = learner.phases(task)
    with Operations() as whole:
        learner.loss(given)
    keys |= {"padding": 0, "flip": False, "brightness": 0.0}
    asked_once = made(name, **keys)
    (phase,) = asked_once.phases(task)
    asked_once.begin_phase(task, PhaseRun(phase, 0, 8, False))
    drawn = next(iter(asked_once.batches.of(phase, 1, 0, 0)))
    with Operations() as without:
        loss, _ = asked_once.loss(drawn)
    per_query = of_query.total / len(given)
    assert asked_once.spent.operations == pytest.approx(len(phase.indices) * per_query)
    saved = whole.total / len(given) - without.total / len(drawn)
    assert saved == pytest.approx(per_query)
    asked_once.query_table = None
    torch.testing.assert_close(asked_once.loss(drawn)[0], loss, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name, keys, says",
    [
        ("l2p", {"size": 4, "top_k": 5}, "top_k: 5 prompts cannot be chosen from 4; raise size"),
        ("coda_prompt", {"prompt_param": [100, 7, 0]}, r"prompt_param: is \[components, an even length"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(name, keys, says):
    with pytest.raises(UserError, match=f"^{says}"):
        resolve({"model_name": name} | keys)
