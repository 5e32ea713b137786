"""The tools that documents name run."""

from tools import forward_overhead


def test_the_walk_of_a_forward_is_timed(capsys):
    forward_overhead.main(["--model", "Ti/16", "--calls", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ViT.__call__") and all(line.endswith(" us") for line in lines)
