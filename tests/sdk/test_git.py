"""The SDK's git module against repositories inside the sandbox: it needs no network."""

import pytest
from e2b import CommandExitException, GitUpstreamException


@pytest.fixture(scope="module")
def origin(shared):
    """A bare repository inside, with one commit on `main`."""
    git = shared.git
    git.configure_user("A Tester", "tester@example.com")
    git.set_config("init.defaultBranch", "main")
    git.init("/home/user/origin.git", bare=True, initial_branch="main")
    git.init("seed", initial_branch="main")
    shared.files.write("seed/README.md", "first\n")
    git.add("seed")
    git.commit("seed", "the first commit")
    git.remote_add("seed", "origin", "/home/user/origin.git")
    git.push("seed", remote="origin", branch="main")
    return "file:///home/user/origin.git"


def test_settings(shared, origin):
    git = shared.git
    assert git.get_config("user.email") == "tester@example.com"
    assert git.get_config("no.such") is None
    git.set_config("demo.key", "here", scope="local", path="seed")
    assert git.get_config("demo.key", scope="local", path="seed") == "here"
    assert git.get_config("demo.key") is None


def test_clone_change_and_push(shared, origin):
    git = shared.git
    git.clone(origin, path="work")
    assert git.remote_get("work", "origin") == origin
    assert git.remote_get("work", "nowhere") is None
    status = git.status("work")
    assert (status.current_branch, status.upstream, status.is_clean) == ("main", "origin/main", True)
    shared.files.write("work/README.md", "second\n")
    shared.files.write("work/new.txt", "new\n")
    status = git.status("work")
    assert {item.name: item.status for item in status.file_status} == {"README.md": "modified", "new.txt": "untracked"}
    assert status.has_untracked and not status.has_staged
    git.add("work", files=["README.md"])
    assert git.status("work").has_staged
    git.restore("work", ["README.md"], staged=True)
    assert not git.status("work").has_staged
    git.add("work")
    git.commit("work", "the second commit", author_name="Someone", author_email="someone@example.com")
    assert git.status("work").ahead == 1
    git.push("work")
    assert git.status("work").ahead == 0
    git.pull("seed", remote="origin", branch="main")
    assert shared.files.read("seed/README.md") == "second\n"
    log = shared.commands.run("git -C seed log --format='%an: %s'").stdout
    assert log == "Someone: the second commit\nA Tester: the first commit\n"


def test_branches_and_reset(shared, origin):
    git = shared.git
    git.clone(origin, path="branches", depth=1)
    git.create_branch("branches", "side")
    shared.files.write("branches/side.txt", "side\n")
    git.add("branches")
    git.commit("branches", "on the side")
    git.checkout_branch("branches", "main")
    assert not shared.files.exists("branches/side.txt")
    branches = git.branches("branches")
    assert sorted(branches.branches) == ["main", "side"]
    assert branches.current_branch == "main"
    git.delete_branch("branches", "side", force=True)
    assert git.branches("branches").branches == ["main"]
    shared.files.write("branches/README.md", "spoilt")
    git.reset("branches", mode="hard")
    assert git.status("branches").is_clean


def test_failures(shared, origin):
    git = shared.git
    with pytest.raises(CommandExitException):
        git.clone("file:///home/user/nothing.git", path="nothing")
    git.init("alone", initial_branch="main")
    git.commit("alone", "empty", allow_empty=True)
    with pytest.raises((GitUpstreamException, CommandExitException)):
        git.pull("alone")
