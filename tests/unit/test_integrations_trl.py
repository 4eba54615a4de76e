"""A rollout for TRL's GRPOTrainer."""

from types import SimpleNamespace

import pytest
import torch
from support.harness_texts import OPTIONS, SUM, WORD

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.integrations.trl import Rollout

ARGS = SimpleNamespace(
    temperature=0.9, top_p=0.95, top_k=20, min_p=None, repetition_penalty=1.0, max_completion_length=6
)
MESSAGES = ([{"role": "user", "content": "What is 1 + 2?"}], [{"role": "user", "content": "Reverse the word cat."}])


@pytest.fixture
def trainer():
    return SimpleNamespace(
        args=ARGS,
        state=SimpleNamespace(global_step=0),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        model=torch.nn.Linear(2, 2),
        tools=None,
        chat_template=None,
        chat_template_kwargs={},
    )


@pytest.fixture
def llm(monkeypatch):
    """An LLM with a list of the names that each update brought."""
    updates: list[list[str]] = []
    monkeypatch.setattr(LLM, "update_weights", lambda llm, weights: updates.append([name for name, _ in weights]))
    with LLM(str(MODEL_DIRECTORY), **OPTIONS) as llm:
        llm.updates = updates  # type: ignore[attr-defined]
        yield llm


@pytest.mark.parametrize("prompts", [(SUM, WORD), MESSAGES], ids=["texts", "conversations"])
def test_each_prompt_gets_a_completion_of_its_own(llm, trainer, prompts):
    given = [prompts[0]] * 3 + [prompts[1]] * 2
    rollout = Rollout(llm, ignore_eos=True)(given, trainer)
    assert set(rollout) == {"prompt_ids", "completion_ids", "logprobs"}
    one = llm.chat if isinstance(prompts[0], list) else llm.generate
    expected = [one(prompt, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids for prompt in prompts]
    assert rollout["prompt_ids"] == [expected[0]] * 3 + [expected[1]] * 2
    assert [len(ids) for ids in rollout["completion_ids"]] == [6] * 5
    assert [len(logprobs) for logprobs in rollout["logprobs"]] == [6] * 5
    assert all(type(each) is float and each <= 0 for logprobs in rollout["logprobs"] for each in logprobs)


def test_weights_are_loaded_once_per_step_of_the_optimizer(llm, trainer):
    rollout = Rollout(llm)
    for step in (0, 0, 1, 1):
        trainer.state.global_step = step
        rollout([SUM], trainer)
    assert llm.updates == [["weight", "bias"]] * 2


def test_two_rollouts_of_a_prompt_differ(llm, trainer):
    rollout = Rollout(llm, ignore_eos=True)
    trainer.args = SimpleNamespace(**{**vars(ARGS), "temperature": 5.0, "top_k": 0, "top_p": 1.0})
    first, second = (rollout([SUM] * 2, trainer)["completion_ids"] for _ in range(2))
    assert len({tuple(ids) for ids in first + second}) == 4


def test_what_the_llm_cannot_follow_is_refused(llm, trainer):
    trainer.tools = [len]
    with pytest.raises(ValueError, match="tools"):
        Rollout(llm)([SUM], trainer)


@pytest.fixture
def with_adapter(trainer):
    """The trainer trains an adapter of peft, beside one that is not active."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIRECTORY, dtype=torch.float32)
    configs = [peft.LoraConfig(r=rank, lora_alpha=5, target_modules=["q_proj", "o_proj"]) for rank in (3, 2)]
    trainer.model = peft.get_peft_model(base, configs[0], adapter_name="policy")
    trainer.model.add_adapter("reference", configs[1])
    return trainer


class FakeAdapters:
    """Takes the place of the runner's: the values that each merge brought, by name."""

    def __init__(self, llm: LLM):
        self.merged: list[dict[str, torch.Tensor]] = []
        self.requests: list[LoRARequest] = []
        llm.engine.runner.set_adapter = self.set_adapter  # type: ignore[method-assign]

    def set_adapter(self, slot: int, request: LoRARequest) -> None:
        assert slot == 0
        self.requests.append(request)
        self.merged.append({name: tensor.clone() for name, tensor in request.tensors.items()})


@pytest.mark.parametrize("prompts", [[SUM, WORD], list(MESSAGES)], ids=["texts", "conversations"])
def test_an_adapter_that_is_trained_is_merged_once_per_step_and_the_weights_stay(with_adapter, monkeypatch, prompts):
    monkeypatch.setattr(LLM, "update_weights", lambda *_: pytest.fail("the weights must stay"))
    with LLM(str(MODEL_DIRECTORY), **OPTIONS, enable_lora=True) as llm:
        fake, rollout, trained = FakeAdapters(llm), Rollout(llm), with_adapter.model
        for step in (0, 0, 1, 1):
            if step != with_adapter.state.global_step:
                with torch.no_grad():
                    [parameter.add_(1) for parameter in trained.parameters() if parameter.requires_grad]
            with_adapter.state.global_step = step
            rollout(prompts, with_adapter)
    first, second = fake.merged  # of two steps
    assert first.keys() == second.keys() and len(first) == 4 * trained.config.num_hidden_layers
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert first[name].shape[0] == 3 and fake.requests[0].config["lora_alpha"] == 5
    assert fake.requests[0].config["peft_type"] == "LORA"
    assert all((second[each] - first[each] >= 0.99).all() for each in first)


@torch.no_grad()
def test_log_probabilities_are_those_of_the_model_with_the_adapter(with_adapter):
    model = with_adapter.model
    with_adapter.args = SimpleNamespace(**{**vars(ARGS), "top_k": 0, "top_p": 1.0})
    with LLM(str(MODEL_DIRECTORY), **OPTIONS, enable_lora=True) as llm:
        rollout = Rollout(llm, ignore_eos=True)
        for step in range(3):
            with_adapter.state.global_step = step
            [parameter.normal_(0, 0.2 * step) for parameter in model.parameters() if parameter.requires_grad]
            for before, after, logprobs in zip(*rollout([SUM, WORD], with_adapter).values(), strict=True):
                logits = model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1].float()
                scores = (logits / ARGS.temperature).log_softmax(-1)
                expected = scores.gather(1, torch.tensor([after]).T)[:, 0]
                assert (expected - torch.tensor(logprobs)).abs().max() < 1e-3


def test_an_adapter_needs_an_llm_that_takes_adapters(llm, with_adapter):
    with pytest.raises(ValueError, match=r"lora_request needs LLM\(enable_lora=True\)"):
        Rollout(llm)([SUM], with_adapter)
    assert llm.updates == []


def test_the_trainer_and_the_llm_agree_on_log_probabilities_as_they_learn(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    differences, steps = [], []

    class Checked(Rollout):
        @torch.no_grad()
        def __call__(self, prompts, trainer):
            rollout = super().__call__(prompts, trainer)
            model = trainer.accelerator.unwrap_model(trainer.model)
            for before, after, logprobs in zip(*rollout.values(), strict=True):
                logits = model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1].float()
                expected = (logits / trainer.args.temperature).log_softmax(-1).gather(1, torch.tensor([after]).T)
                differences.append((expected[:, 0] - torch.tensor(logprobs)).abs().max().item())
            steps.append(trainer.state.global_step)
            return rollout

    args = trl.GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, max_steps=3, learning_rate=1e-3, report_to="none",
        per_device_train_batch_size=4, num_generations=4, max_completion_length=6, temperature=4.0,
        save_strategy="no", disable_tqdm=True, top_k=0,
    )  # fmt: skip
    dataset = datasets.Dataset.from_list([{"prompt": SUM}, {"prompt": WORD}])
    with LLM(str(MODEL_DIRECTORY), **OPTIONS) as llm:
        before = llm.loglikelihood([SUM], [" 42"], use_tqdm=False)[0].total
        trainer = trl.GRPOTrainer(
            str(MODEL_DIRECTORY), args=args, train_dataset=dataset, rollout_func=Checked(llm),
            reward_funcs=lambda completions, **_: [float(sum(text.encode()) % 7) for text in completions],
        )  # fmt: skip
        with torch.enable_grad():  # lighteval, if another test imported it, has turned gradients off
            trainer.train()
        assert steps == [0, 1, 2]
        assert max(differences) < 1e-3
        assert llm.loglikelihood([SUM], [" 42"], use_tqdm=False)[0].total != before
