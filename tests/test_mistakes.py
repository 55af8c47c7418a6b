"""The mistakes that people make, kept red: each is planted in a copy of the project, whose own checks must catch it."""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest
from conftest import ROOT


@dataclass
class Mistake:
    """What is planted where, what comes of it, and the check that catches it."""

    name: str
    script: str
    edits: dict  # what the script holds once -> what the mistake puts there
    harm: str
    check: str


MISTAKES = [
    Mistake(
        "the tied weight is assigned to .weights",
        "speedup_01_weight_tying.py",
        {"self.transformer.wte.weight = self.lm_head.weight": "self.transformer.wte.weights = self.lm_head.weight"},
        "Python makes a new attribute; nothing is tied and nothing complains",
        "test_model.py::test_the_head_and_the_embedding_are_one_matrix_and_stay_so[speedup_01_weight_tying.py]",
    ),
    Mistake(
        "the clock is read without a synchronisation",
        "baseline.py",
        {"            synchronize(device)\n            times.append(": "            times.append("},
        "it reads how long Python took to queue the work",
        "test_training.py::test_the_clock_is_read_when_the_device_has_finished[baseline.py]",
    ),
    Mistake(
        "tokens per millisecond are printed as per second",
        "speedup_02_tf32.py",
        {"{B * T / times[-1]:10,.0f} tok/s": "{B * T / (1000 * times[-1]):10,.0f} tok/s"},
        "the figure is a thousandfold too small and still looks like one",
        "test_training.py::test_tokens_are_counted_per_second[speedup_02_tf32.py]",
    ),
    Mistake(
        "the step is timed without fetching its batch",
        "speedup_08_adamw_clip.py",
        {
            "            start = time.perf_counter()\n": "",
            "optimizer.zero_grad()\n": "start = time.perf_counter()\n            optimizer.zero_grad()\n",
        },
        "a slow loader goes unseen",
        "test_training.py::test_the_clock_is_read_when_the_device_has_finished[speedup_08_adamw_clip.py]",
    ),
    Mistake(
        "no causal mask",
        "speedup_06_flash_attn.py",
        {"F.scaled_dot_product_attention(q, k, v, is_causal=True)": "F.scaled_dot_product_attention(q, k, v)"},
        "the model reads the answer: the loss falls faster than it can",
        "test_model.py::test_a_later_token_never_changes_an_earlier_logit[speedup_06_flash_attn.py]",
    ),
    Mistake(
        "a mask that is one diagonal off",
        "baseline.py",
        {"dtype=torch.bool).tril()": "dtype=torch.bool).tril(1)"},
        "each token sees the next, which is the one it must guess",
        "test_model.py::test_a_later_token_never_changes_an_earlier_logit[baseline.py]",
    ),
    Mistake(
        "attention is scaled by C in place of the head size",
        "baseline.py",
        {"math.sqrt(k.size(-1))": "math.sqrt(C)"},
        "it trains all the same; loaded weights compute something else",
        "test_pretrained.py::test_the_logits_are_those_of_transformers[baseline.py]",
    ),
    Mistake(
        "GELU without GPT-2's tanh",
        "speedup_04_residual_init.py",
        {', approximate="tanh")': ")"},
        "it trains all the same; loaded weights give logits that are slightly off",
        "test_pretrained.py::test_the_logits_are_those_of_transformers[speedup_04_residual_init.py]",
    ),
    Mistake(
        "dropout in flash attention",
        "speedup_06_flash_attn.py",
        {"is_causal=True": "is_causal=True, dropout_p=0.1"},
        "the function knows no model.eval(): what it drops in training it drops in evaluation",
        "test_numerics.py::test_the_first_step_is_that_of_the_rung_before_in_float32[speedup_06_flash_attn.py]",
    ),
    Mistake(
        "what torch.compile returns is thrown away",
        "speedup_05_compile.py",
        {"model.compile(mode=args.compile_mode)": "torch.compile(model, mode=args.compile_mode)"},
        "it returns a new module, and the old one runs on uncompiled",
        "test_errors.py::test_no_compiler",
    ),
    Mistake(
        "a training step returns the logits, too",
        "speedup_05_compile.py",
        {
            "return logits if targets is None else F.cross_entropy(": "return logits, F.cross_entropy(",
            "loss = model(x, y)": "logits, loss = model(x, y)",
        },
        "the compiled graph gives the logits a gradient of zeros, adds it, and keeps them until it has made the next",
        "test_training.py::test_a_compiled_step_returns_the_loss_and_nothing_else[speedup_05_compile.py]",
    ),
    Mistake(
        "the targets are not shifted",
        "speedup_07_vocab_pad.py",
        {"tokens[1:].view(self.B, self.T)": "tokens[:-1].view(self.B, self.T)"},
        "the model learns to repeat its input",
        "test_data.py::test_batches_are_consecutive_shifted_and_start_over[speedup_07_vocab_pad.py]",
    ),
    Mistake(
        "the loader drops the last batch",
        "speedup_09_cosine_lr.py",
        {"if self.position + self.B * self.T + 1 > len(": "if self.position + 2 * self.B * self.T + 1 > len("},
        "the end of the text is never read",
        "test_data.py::test_batches_are_consecutive_shifted_and_start_over[speedup_09_cosine_lr.py]",
    ),
    Mistake(
        "the loader drops a last batch that ends with the text",
        "speedup_03_bf16.py",
        {"if self.position + self.B * self.T + 1 > len(": "if self.position + self.B * self.T + 1 >= len("},
        "off by one at the end of an epoch",
        "test_data.py::test_a_last_batch_that_ends_with_the_text_is_read[speedup_03_bf16.py]",
    ),
    Mistake(
        "the ranks read the same batches",
        "ddp_run.py",
        {"= batch_size, seq_len, batch_size * seq_len * rank": "= batch_size, seq_len, 0"},
        "n GPUs compute one gradient n times",
        "test_data.py::test_two_ranks_share_out_the_batches_of_one",
    ),
    Mistake(
        "zero_grad is forgotten",
        "speedup_08_adamw_clip.py",
        {"            optimizer.zero_grad()\n": ""},
        "gradients pile up, and clipping hides that they do",
        "test_training.py::test_each_step_starts_without_the_gradients_of_the_last[speedup_08_adamw_clip.py]",
    ),
    Mistake(
        "the loss is not divided under accumulation",
        "ddp_run.py",
        {"(micro_loss / accumulation).backward()": "micro_loss.backward()"},
        "the gradient grows with the number of micro-steps, and clipping hides it",
        "test_training.py::test_micro_steps_add_up_to_the_gradient_of_the_whole_batch",
    ),
    Mistake(
        "the loss is divided twice under accumulation",
        "ddp_run.py",
        {"(micro_loss / accumulation).backward()": "(micro_loss / accumulation / accumulation).backward()"},
        "the gradient shrinks with the number of micro-steps, and AdamW hides it",
        "test_training.py::test_micro_steps_add_up_to_the_gradient_of_the_whole_batch",
    ),
    Mistake(
        "the printed loss is that of the last micro-step",
        "ddp_run.py",
        {"report[0] += micro_loss.detach() / accumulation /": "report[0] = micro_loss.detach() /"},
        "the curve is noisier than the training",
        "test_training.py::test_micro_steps_add_up_to_the_gradient_of_the_whole_batch",
    ),
    Mistake(
        "the gradient sync flag is set after the forward pass",
        "ddp_run.py",
        {
            """\
                with nullcontext() if not ddp or micro_step == accumulation - 1 else model.no_sync():
                    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=use_bf16):
                        micro_loss = model(x, y)
                    (micro_loss / accumulation).backward()  # they add up on each rank; the last averages over ranks
""": """\
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=use_bf16):
                    micro_loss = model(x, y)
                model.require_backward_grad_sync = micro_step == accumulation - 1
                (micro_loss / accumulation).backward()
"""
        },
        "DDP reads the flag in the forward pass: the last gradients stay at home, and the ranks drift apart",
        "test_training.py::test_gradients_travel_once_per_step_in_the_last_backward_pass",
    ),
    Mistake(
        "gradients travel in every micro-step",
        "ddp_run.py",
        {"nullcontext() if not ddp or micro_step == accumulation - 1 else model.no_sync()": "nullcontext()"},
        "right, and as slow as the link is",
        "test_training.py::test_gradients_travel_once_per_step_in_the_last_backward_pass",
    ),
    Mistake(
        "the schedule is off by one step",
        "ddp_run.py",
        {"get_lr(step, args.steps)": "get_lr(step + 1, args.steps)"},
        "the warm-up is a step short, and the last step is taken with the rate after the end",
        "test_training.py::test_the_printed_rate_is_the_one_the_step_is_taken_with[ddp_run.py]",
    ),
    Mistake(
        "the warm-up begins at zero",
        "speedup_09_cosine_lr.py",
        {"return max_lr * (step + 1) / warmup_steps": "return max_lr * step / warmup_steps"},
        "the first step moves nothing",
        "test_training.py::test_the_learning_rate_warms_up_and_falls_along_a_cosine[speedup_09_cosine_lr.py]",
    ),
    Mistake(
        "the learning rate is set after the optimizer's step",
        "speedup_10_fused_adamw.py",
        {
            """\
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
""": """\
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] = lr
"""
        },
        "each step is taken with the rate of the one before, the first with AdamW's default",
        "test_training.py::test_the_printed_rate_is_the_one_the_step_is_taken_with[speedup_10_fused_adamw.py]",
    ),
    Mistake(
        "LayerNorm and biases decay",
        "speedup_10_fused_adamw.py",
        {"p.dim() >= 2": "p.dim() >= 1", "p.dim() < 2": "p.dim() < 1"},
        "gains are pulled to zero",
        "test_training.py::test_only_matrices_decay[speedup_10_fused_adamw.py]",
    ),
    Mistake(
        "the betas of another optimizer",
        "speedup_08_adamw_clip.py",
        {"betas=(0.9, 0.95)": "betas=(0.9, 0.99)"},
        "the first step is the same, whatever the betas are",
        "test_numerics.py::test_the_weights_move_as_the_equations_of_adamw_say[speedup_08_adamw_clip.py]",
    ),
    Mistake(
        "the gradient is clipped after the step",
        "speedup_08_adamw_clip.py",
        {
            """\
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # returns the norm before clipping
            optimizer.step()
""": """\
            optimizer.step()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # returns the norm before clipping
"""
        },
        "the norm is printed and nothing is clipped",
        "test_training.py::test_the_gradient_is_clipped_to_a_norm_of_1_before_the_step[speedup_08_adamw_clip.py]",
    ),
    Mistake(
        "a GradScaler without unscale before clipping",
        "speedup_08_adamw_clip.py",
        {
            """\
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # returns the norm before clipping
            optimizer.step()
""": """\
            scaler = torch.amp.GradScaler(device.type)
            scaler.scale(loss).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # returns the norm before clipping
            scaler.step(optimizer)
            scaler.update()
"""
        },
        "gradients 65,536 times too large are cut to 1, then divided: almost nothing is left",
        "test_training.py::test_the_gradient_is_clipped_to_a_norm_of_1_before_the_step[speedup_08_adamw_clip.py]",
    ),
    Mistake(
        "the residual scale is on every Linear",
        "speedup_04_residual_init.py",
        {'name.endswith("c_proj.weight")': 'name.endswith(("c_proj.weight", "c_attn.weight", "c_fc.weight"))'},
        "the blocks begin almost silent",
        "test_model.py::test_every_parameter_starts_as_the_contract_says[speedup_04_residual_init.py]",
    ),
    Mistake(
        "the residual flag is lost",
        "speedup_04_residual_init.py",
        {'if name.endswith("c_proj.weight")': 'if hasattr(p, "RESIDUAL")'},
        "a flag set on one object and looked for on another is never found",
        "test_model.py::test_every_parameter_starts_as_the_contract_says[speedup_04_residual_init.py]",
    ),
    Mistake(
        "the padded rows are left out of the tie",
        "speedup_07_vocab_pad.py",
        {"wte.weight = self.lm_head.weight": "wte.weight = nn.Parameter(self.lm_head.weight[:50257])"},
        "padding makes a copy, and the copy is a second matrix",
        "test_model.py::test_the_head_and_the_embedding_are_one_matrix_and_stay_so[speedup_07_vocab_pad.py]",
    ),
    Mistake(
        "the padded rows are zeros",
        "speedup_07_vocab_pad.py",
        {"state[name].mean(dim=0).expand(": "torch.zeros(hf.config.n_embd).expand("},
        "GPT-2's logits are far below zero: tokens that do not exist take all the probability",
        "test_pretrained.py::test_the_loss_is_right_where_logits_are_far_below_zero_as_gpt2s_are[speedup_07_vocab_pad.py]",
    ),
    Mistake(
        "autocast is around the backward pass alone",
        "speedup_03_bf16.py",
        {
            """\
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=use_bf16):
                loss = model(x, y)
            loss.backward()
""": """\
            loss = model(x, y)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=use_bf16):
                loss.backward()
"""
        },
        "a backward pass runs in the types of its forward pass: nothing gets faster",
        "test_numerics.py::test_the_error_is_that_of_the_precision[speedup_03_bf16.py]",
    ),
    Mistake(
        "the weights themselves are cast to bf16",
        "speedup_03_bf16.py",
        {"        model.to(device)\n": "        model.to(device, torch.bfloat16)\n"},
        "an update smaller than about 1/256 of its weight is rounded away",
        "test_numerics.py::test_the_error_is_that_of_the_precision[speedup_03_bf16.py]",
    ),
    Mistake(
        "the seed is set after the model is built",
        "baseline.py",
        {
            "    torch.manual_seed(args.seed)\n": "",
            "    B, T = args.batch_size": "    torch.manual_seed(args.seed)\n    B, T = args.batch_size",
        },
        "the weights are not those of the seed",
        "test_training.py::test_a_run_starts_from_the_weights_of_its_seed[baseline.py]",
    ),
    Mistake(
        "the optimizer is not resumed",
        "ddp_run.py",
        {
            'set_state_dict(model, optimizer, model_state_dict=saved.pop("model"), '
            'optim_state_dict=saved.pop("optim"))': 'model.load_state_dict(saved["model"])'
        },
        "AdamW begins with empty moments: the loss jumps where the run went on",
        "test_checkpoints.py::test_a_resumed_run_is_the_undisturbed_one_bit_for_bit[ddp_run.py]",
    ),
    Mistake(
        "the place in the text is not resumed",
        "ddp_run.py",
        {'            loader.position = saved["position"] + B * T * rank\n': ""},
        "each part of the run reads the beginning of the text again",
        "test_checkpoints.py::test_a_resumed_run_is_the_undisturbed_one_bit_for_bit[ddp_run.py]",
    ),
    Mistake(
        "a checkpoint is written under its own name",
        "ddp_run.py",
        {
            'with open(folder / "unfinished.tmp", "wb") as': (
                'with open(folder / f"step_{checkpoint[\'step\']:08d}.pt", "wb") as'
            )
        },
        "a kill while it is written leaves half a file that looks like the newest",
        "test_checkpoints.py::test_a_kill_while_saving_costs_that_checkpoint_alone",
    ),
    Mistake(
        "a checkpoint may run code",
        "ddp_run.py",
        {"weights_only=True)": "weights_only=False)"},
        "who can write to the folder can run a command as you",
        "test_checkpoints.py::test_a_damaged_checkpoint_is_passed_over_for_the_one_before[code]",
    ),
    Mistake(
        "the scaler never meets the optimizer",
        "branches/fp16_grad_scaler.py",
        {"            scaler.step(optimizer)  # calls optimizer.step(), or skips it if a gradient is not finite\n": ""},
        "the weights stay as they are; in a public notebook the loss is 10.93 for 50 steps",
        "test_branches.py::test_it_learns",
    ),
    Mistake(
        "the gradient is clipped while it is scaled",
        "branches/fp16_grad_scaler.py",
        {
            "            scaler.unscale_(optimizer)  # first: what clips, or prints, must see the gradients "
            "as they are\n": "",
            "scaler.step(optimizer)  #": "scaler.unscale_(optimizer)\n            scaler.step(optimizer)  #",
        },
        "a norm of 1 is left of gradients 65536 times too large, and that is divided by 65536",
        "test_training.py::test_the_gradient_is_clipped_to_a_norm_of_1_before_the_step[branches/fp16_grad_scaler.py]",
    ),
    Mistake(
        "a validation loss is a mean of means",
        "pretrain/train.py",
        {"total, count = total + loss * rows * T, count + rows * T": "total, count = total + loss, count + 1"},
        "the last, smaller batch weighs as much as the others: the loss depends on B and the number of GPUs",
        "test_pretrain.py::test_the_validation_loss_is_the_same_for_any_batch_and_number_of_ranks[7-4]",
    ),
    Mistake(
        "each epoch reads the shards in the same order",
        "pretrain/train.py",
        {"np.random.default_rng((self.seed, epoch))": "np.random.default_rng(self.seed)"},
        "a second epoch is the first again, with the same batches",
        "test_pretrain.py::test_each_epoch_and_each_seed_orders_the_shards_anew",
    ),
    Mistake(
        "HellaSwag scores the context with the ending",
        "pretrain/hellaswag.py",
        {
            "targets[row, len(tokens) - 1 - len(ending) : len(tokens) - 1] = tokens[-len(ending) :]": (
                "targets[row, : len(tokens) - 1] = tokens[1:]"
            )
        },
        "the mean is over the wrong tokens: acc_norm is off, acc is right, and nothing looks wrong",
        "test_pretrain.py::test_the_answers_of_examples_made_for_it_are_known",
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_caught(mistake, tmp_path):
    root = tmp_path / "ladder"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "__pycache__", "site"))
    source = (root / mistake.script).read_text(encoding="utf-8")
    for right, wrong in mistake.edits.items():
        assert source.count(right) == 1, right
        source = source.replace(right, wrong)
    (root / mistake.script).write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", f"tests/{mistake.check}"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout  # 1: a test failed
    assert re.search(r"^E +(assert|AssertionError)", done.stdout, re.MULTILINE), done.stdout  # by what it asserts
