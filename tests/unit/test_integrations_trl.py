"""A rollout for TRL's GRPOTrainer."""

from types import SimpleNamespace

import pytest
import torch
from support.harness_texts import OPTIONS, SUM, WORD

from nanovllm import LLM, SamplingParams
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
    trainer.tools, trainer.model.peft_config = None, {}
    with pytest.raises(ValueError, match="without peft_config"):
        Rollout(llm)([SUM], trainer)


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
