"""Claude Code and Codex, unmodified, as the agents of an attempt.

    npm install -g @anthropic-ai/claude-code @openai/codex

Without these programs the tests are skipped. The actor and its endpoint are real. The engine is
FAKE (ChatEngine): it says a call of the agent's shell tool, and then "done!".
"""

import asyncio
import os
import shutil

import pytest
from test_episode import play

# The prompts of these agents have 10,000 to 20,000 tokens.
LIMITS = dict(max_model_len=400_000, row_tokens=800_000, max_new_tokens=2000)
SECRET = "the file says so 7"


async def output_of(folder, *command, **env):
    """What a program prints that works in a folder with one file, a.txt."""
    work = folder / "work"
    work.mkdir()
    (work / "a.txt").write_text(SECRET + "\n")
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=work,
        env=os.environ | {"HOME": str(folder)} | env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await asyncio.wait_for(process.communicate(), 100)
    return printed.decode()


def check(folder, call, episode):
    """Play an attempt of two turns; its tokens must be exact, and the tool's output among them."""
    [sample], prompts, _ = play(folder, [call, "done!"], episode, **LIMITS)
    assert sample["reward"] == 1.0 and len(prompts) == 2
    assert prompts[1][: len(prompts[0])] == prompts[0]
    assert sample["segment"].max() == 0
    assert sample["mask"].sum() == len(call) + len("done!") + 2


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("claude"), reason="Claude Code is not installed")
def test_claude_code_calls_its_shell(tmp_path):
    async def episode(problem, model):
        printed = await output_of(
            tmp_path,
            *("claude", "-p", "Hi", "--max-turns", "3", "--dangerously-skip-permissions"),
            ANTHROPIC_BASE_URL=model.base_url.removesuffix("/v1"),
            ANTHROPIC_API_KEY=model.api_key,
            ANTHROPIC_MODEL="policy",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            # It refuses to skip permissions as root unless it is told that it is confined.
            IS_SANDBOX="1",
        )
        return float(printed.strip() == "done!")

    call = '<call>Bash {"command": "cat a.txt", "description": "x"}</call>'
    check(tmp_path, call, episode)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("codex"), reason="Codex is not installed")
def test_codex_calls_its_shell(tmp_path):
    async def episode(problem, model):
        home = tmp_path / "codex"
        home.mkdir()
        (home / "config.toml").write_text(
            'model = "policy"\nmodel_provider = "run"\n[model_providers.run]\nname = "run"\n'
            f'base_url = "{model.base_url}"\nenv_key = "ATTEMPT_KEY"\nwire_api = "responses"\n'
        )
        flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        keys = dict(CODEX_HOME=str(home), ATTEMPT_KEY=model.api_key)
        printed = await output_of(tmp_path, "codex", "exec", *flags, "Hi", **keys)
        return float(SECRET in printed and printed.strip().endswith("done!"))

    check(tmp_path, '<call>exec_command {"cmd": "cat a.txt"}</call>', episode)
