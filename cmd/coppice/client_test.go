package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/internal/cli/clitest"
	"github.com/coppice-dev/coppice/internal/cli/exit"
)

// TestHelp keeps the help of the client commands as it was reviewed.
func TestHelp(t *testing.T) {
	t.Parallel()
	var all strings.Builder
	for _, line := range []string{
		"controller", "migrate", "runner", "runner-token", "runner-token create", "runner-token ensure", "runner-token revoke", "runner-trash", "runner-trash keep", "runner-trash release",
		"ws", "ws create", "ws ls", "ws show", "ws rm", "ws exec", "ws shell", "ws cp", "ws rename", "ws label", "ws network", "ws forward", "ws logs", "ws suspend", "ws resume", "ws usage",
		"ckpt", "ckpt create", "ckpt ls", "ckpt show", "ckpt tree", "ckpt diff", "ckpt annotate", "ckpt rename", "ckpt label", "ckpt cat", "ckpt rm", "ckpt pin", "ckpt unpin", "ckpt prune", "ckpt retain", "ckpt usage", "ckpt export", "ckpt import",
		"fork", "restore", "context", "context ls", "context use", "context add", "context rm", "session", "session ls", "session kill", "op", "op ls", "op show", "op cancel", "events", "mcp",
		"project", "project create", "project ls", "project show", "project quota", "project rm", "key", "key create", "key ls", "key show", "key revoke", "image", "image build", "image ls", "image pull", "image rm", "version",
	} {
		a, stdout, _ := clitest.App(nil)
		if status := run(t.Context(), a, append(strings.Fields(line), "--help")); status != 0 {
			t.Errorf("%s --help: status %d", line, status)
		}
		text, _, _ := strings.Cut(stdout.String(), "\nGlobal Flags:")
		all.WriteString("$ coppice " + line + " --help\n" + text + "\n")
	}
	clitest.Golden(t, "help.txt", all.String())
}

func TestClientCommands(t *testing.T) {
	t.Parallel()
	f, run := clitest.NewServer(t, commands...)
	sample := clitest.SampleTree()
	f.Workspaces, f.Checkpoints = sample.Workspaces, sample.Checkpoints
	gone := clitest.Workspace(11, "gone", api.WorkspaceTerminated)
	f.Workspaces = append(f.Workspaces, gone, clitest.Workspace(10001, "alike", api.WorkspaceReady))
	for _, x := range []struct {
		line           string
		status         int
		stdout, stderr string
	}{
		{"ws ls", 0, "demo    00000001  ready", ""},
		{"ws ls -q", 0, clitest.ID("ws", 1) + "\n" + clitest.ID("ws", 2) + "\n", ""},
		{"ws ls --all", 0, "gone", ""},
		{"ws ls --json", 0, `"name": "demo"`, ""},
		{"ws show demo", 0, "machine-id   cccc", ""},
		{"ws show 00000001", 0, "name         demo", ""},
		{"ws show " + clitest.ID("ws", 1), 0, "name         demo", ""},
		{"ws show nobody", exit.NotFound, "", `there is no workspace "nobody"; list the workspaces with coppice ws ls`},
		{"ws show 0001", exit.BadInput, "", `"0001" names 2 workspaces`},
		{"ws show --json nobody", exit.NotFound, "", `"code":"WORKSPACE_NOT_FOUND"`},
		{"ws create --name made --env A=1 --vcpus 2 --ttl 90s --label k=v", 0, "made is ready after", ""},
		{"ws create -q", 0, clitest.ID("ws", 9) + "\n", ""},
		{"ws create --env A", exit.Usage, "", `--env "A" is not of the form KEY=VALUE`},
		{"ws create --ttl -5m", exit.Usage, "", "--ttl -5m0s is negative"},
		{"ws create --allow http://pypi.org/simple", exit.Usage, "", "give --allow pypi.org:80"},
		{"ws create --allow https://pypi.org/simple", exit.Usage, "", "give --allow pypi.org\n"},
		{"__complete ws show d", 0, "demo\tready\n", "ShellCompDirectiveNoFileComp"},
		{"__complete fork b", 0, "before-upgrade\tcaptured\n", "ShellCompDirectiveNoFileComp"},
		{"__complete ws rm demo s", 0, "second\t", "ShellCompDirectiveNoFileComp"},
		{"__complete restore before-upgrade --in d", 0, "demo\tready\n", "ShellCompDirectiveNoFileComp"},
		{"session ls demo", 0, "No sessions.", ""},
		{"session kill demo 00000001", exit.NotFound, "", `has no session "00000001"`},
		{"ws create --ttl 1ms", exit.Usage, "", "whole number of seconds"},
		{"ws forward demo", 0, "No ports are forwarded.", ""},
		{"ws forward demo 8080:80 443 8443 --detach", 0, "127.0.0.1:8080 -> demo:80\n127.0.0.1:0 -> demo:443\n127.0.0.1:8443 -> demo:8443\n", ""},
		{"ws forward demo 9999 --detach", 0, "127.0.0.1:9999 -> demo:9999\n", "(PORT_CLOSED); connections to 127.0.0.1:9999 are closed until one does"},
		{"ws forward demo", 0, "127.0.0.1:8080  80", ""},
		{"ws forward demo --stop 127.0.0.1:8080", 0, "", ""},
		{"ws forward demo --stop 127.0.0.1:8080", exit.Failure, "", "forwards no port"},
		{"ws forward demo a:80", exit.Usage, "", `"a:80" is not of the form`},
		{"ws logs demo", exit.NotFound, "", "has no sessions"},
		{"ws logs --console demo", 0, "booting\x1b[2J\r\nready", ""},
		{"ws shell demo", exit.Usage, "", "must both be a terminal"},
		{"ws cp a b", exit.Usage, "", "one of SOURCE and DESTINATION"},
		{"ws cp --tar demo:/a b", exit.Usage, "", "--tar goes with -"},
		{"ws cp demo:/f -", 0, "content of /f", ""},
		{"ws cp --tar demo:/f -", 0, "archive of /f", ""},
		{"ws cp - demo:/g", 0, "", "0 B in"},
		{"ws cp demo:/f second:/g", 0, "", "13 B in"},
		{"ws rename demo release", 0, "00000001 is now called release", ""},
		{"ws rename release demo", 0, "00000001 is now called demo", ""},
		{"ws label demo a=1 team-", 0, "demo, version 4: a=1", ""},
		{"ws label demo team", exit.Usage, "", "neither KEY=VALUE"},
		{"ws label demo a=1 a-", exit.Usage, "", "given twice"},
		{"ws network demo --add api.example.com --remove b.example.com", 0, "demo: deny-all", ""},
		{"ws network demo --add api.example.com --allow-none", exit.Usage, "", "change single destinations"},
		{"ws network demo --add https://api.example.com/x", exit.Usage, "", "give --add api.example.com\n"},
		{"ckpt ls", 0, "00000002  before-upgrade  captured  user", ""},
		{"ckpt ls before-upgrade:/d", 0, "file  0644  1000:1000  3", ""},
		{"ckpt ls before-upgrade:/d -q", exit.Usage, "", "do not go with"},
		{"ckpt ls before-upgrade", exit.Usage, "", "is not CHECKPOINT:/absolute/path"},
		{"ckpt cat before-upgrade:/f", 0, "content of /f", ""},
		{"ckpt cat before-upgrade:f", exit.Usage, "", "is not CHECKPOINT:/absolute/path"},
		{"ckpt rename before-upgrade later", 0, "00000001 is now called later", ""},
		{"ckpt label before-upgrade a=1 b-", 0, "version 3: a=1", ""},
		{"ckpt ls -q", 0, clitest.ID("ckpt", 1) + "\n", ""},
		{"ckpt show before-upgrade", 0, `{"action":"edit","list":[1],"score":0.98765,"visits":12}`, ""},
		{"ckpt show nothing", exit.NotFound, "", "coppice ckpt ls or coppice ckpt tree"},
		{"ckpt tree", 0, "├─● 00000002 before-upgrade", ""},
		{"ckpt tree demo", 0, "● 00000001 image base", ""},
		{"ckpt tree before-upgrade --json", 0, `"score": 0.98765`, ""},
		{"ckpt diff before-upgrade 00000001", 0, "M /etc/passwd (content, mtime)\nA \"/evil\\x1b[2J\"\nD \"/\\xff\"\n+ process 12 sleep 100\n- process 7 [kworker]\n" +
			"1 added, 1 changed, 1 removed; 1 started, 1 gone; 5.0 MiB of memory differ\n1 files are damaged", ""},
		{"ckpt diff before-upgrade 00000001 --content", 0, "5.0 MiB of memory differ\n1 files are damaged", ""},
		{"ckpt diff before-upgrade 00000001 --content --json", 0, `"note": "its name is not text"`, ""},
		{"ckpt diff before-upgrade 00000001 --json", 0, `"memory_changed_bytes": 5242880`, ""},
		{"ckpt diff before-upgrade nothing", exit.NotFound, "", `there is no checkpoint "nothing"`},
		{"ckpt create demo --name n --annotation score=0.5 --annotation note=x", 0, "demo paused for 21.2 ms, 3.0 MiB", ""},
		{"ckpt annotate before-upgrade score=1 note=two old-", 0, `version 3: {"note":"two","old":null,"score":1}`, ""},
		{"ckpt rm before-upgrade nothing", exit.NotFound, "", "there is no checkpoint \"nothing\"; list the checkpoints with coppice ckpt ls or coppice ckpt tree\nnothing was changed"},
		{"ckpt rm before-upgrade " + clitest.ID("ckpt", 2), 0, clitest.ID("ckpt", 2) + " is deleted", ""},
		{"ckpt rm before-upgrade --cascade --dry-run", 0, "1 would go, 3.0 MiB; 0 stay", ""},
		{"ckpt rm before-upgrade --cascade", 0, "1 went, 3.0 MiB", ""},
		{"ckpt pin before-upgrade", 0, " is pinned", ""},
		{"ckpt unpin before-upgrade", 0, " is not pinned", ""},
		{"ckpt prune before-upgrade --keep-best 3 --score value --max-bytes 2G --dry-run", 0, "1 would go, 1.0 MiB; 4 stay, 5.0 MiB\nThe checkpoints that must stay", ""},
		{"ckpt prune before-upgrade", exit.Usage, "", "say what to keep"},
		{"ckpt prune before-upgrade --max-bytes 2X", exit.Usage, "", "not a size"},
		{"ckpt retain before-upgrade --keep-best 3 --keep-path --max-age 24h", 0, "3 by score", ""},
		{"ckpt retain before-upgrade --show", exit.NotFound, "", "RETENTION_NOT_FOUND"},
		{"ckpt retain before-upgrade --remove", 0, "", ""},
		{"fork demo -n 2 --name try", 0, "2 of 2 from checkpoint 00000007", ""},
		{"fork before-upgrade -n 2 --name try -q", 0, clitest.ID("ws", 20) + "\n" + clitest.ID("ws", 21) + "\n", ""},
		{"fork before-upgrade -n 2 --name try -q --spread", 0, clitest.ID("ws", 20) + "\n" + clitest.ID("ws", 21) + "\n", ""},
		{"fork demo -n 2 --spread", exit.Usage, "", "needs a sealed checkpoint"},
		{"fork nothing", exit.NotFound, "", "no workspace and no checkpoint"},
		{"restore before-upgrade --name again", 0, "again is ready after", ""},
		{"restore before-upgrade --in demo", 0, "epoch 2", ""},
		{"restore before-upgrade --in demo --name x", exit.Usage, "", "do not set any of them"},
		{"op show " + clitest.ID("op", 1), 0, "no runner has room (CAPACITY)", ""},
		{"op ls", 0, "OPERATION                      KIND             STATE", ""},
		{"op ls -q --workspace demo", 0, clitest.ID("op", 1) + "\n", ""},
		{"op ls -n 0", exit.Usage, "", "not a positive number"},
		{"op cancel " + clitest.ID("op", 1) + " " + clitest.ID("op", 2), 0, clitest.ID("op", 1) + " is canceled\n" + clitest.ID("op", 2) + " had succeeded already\n", ""},
		{"op cancel demo", exit.BadInput, "", "not the id of an operation"},
		{"__complete op cancel o", 0, clitest.ID("op", 1) + "\tfork_checkpoint", "ShellCompDirectiveNoFileComp"},
		{"__complete ckpt cat b", 0, "before-upgrade:/\tcaptured\n", "ShellCompDirectiveNoSpace"},
		{"ws usage demo", 0, "CPU          12.5 s", ""},
		{"ckpt usage before-upgrade", 0, "7.0 MiB", ""},
		{"ws suspend demo", 0, "demo (00000001) is suspended after", ""},
		{"ws resume demo", 0, "demo (00000001) is ready after", ""},
		{"ws suspend nosuch", exit.NotFound, "", "no workspace"},
		{"ws create --on-idle terminate", exit.Usage, "", "needs --idle"},
		{"ws create --idle 1500ms", exit.Usage, "", "--idle 1.5s is not a whole number"},
		{"ws suspend demo nosuch nobody", exit.NotFound, "", `no workspace "nosuch"`},
		{"ws rm demo nosuch", exit.NotFound, "", "nothing was changed"},
		{"ws rm demo second", 0, "demo (00000001) is terminated\nsecond (00000002) is terminated\n", ""},
		{"ws rm", exit.Usage, "", "name a workspace"},
		{"image ls --images-dir " + t.TempDir(), 0, "No images. Build one: coppice image build", ""},
		{"image pull --agent /nowhere/agent python:3.12-slim", exit.BadInput, "", "build it with \"make build\""},
		{"image build --agent /nowhere/agent", exit.BadInput, "", "build it with \"make build\""},
	} {
		status, stdout, stderr := run(strings.Fields(x.line)...)
		if strings.Contains(stderr, "nothing was changed") && stdout != "" {
			t.Errorf("%s: it says that nothing was changed, and %q", x.line, stdout)
		}
		if status != x.status || !strings.Contains(stdout, x.stdout) || !strings.Contains(stderr, x.stderr) || x.stderr == "" && stderr != "" {
			t.Errorf("%s: status %d, stdout %q, stderr %q; want %d, %q, %q", x.line, status, stdout, stderr, x.status, x.stdout, x.stderr)
		}
	}
	want := api.CreateWorkspaceRequest{Name: "made", Env: api.Env{"A": "1"}, Resources: api.ResourcesRequest{VCPUs: new(2)}, TTLSeconds: 90, Labels: api.Labels{"k": "v"}}
	if diff := cmp.Diff(want, f.Requests[0]); diff != "" {
		t.Errorf("request of ws create (-want +got):\n%s", diff)
	}
}
