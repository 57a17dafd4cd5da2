package e2e

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestDiff: a file that was written just before a checkpoint, a file of the image that was changed, and a process that was started are
// what the command line and the API say that differs, from a checkpoint to its child and from one branch to another.
func TestDiff(t *testing.T) {
	c := newCLI(t)
	id := forkOne(t, c.s, seed(t))
	shell(t, c.s, id, "mkdir /root/diff; echo 1 > /root/diff/stays; echo 1 > /root/diff/goes")
	c.ok("ckpt", "create", id, "--name", "diff-before")
	shell(t, c.s, id, "echo new > /root/diff/comes; rm /root/diff/goes; chmod 600 /etc/passwd; echo 10.9.9.9 db >> /etc/hosts; sleep 4242 > /dev/null 2>&1 &")
	c.ok("ckpt", "create", id, "--name", "diff-after")
	out := c.ok("ckpt", "diff", "diff-before", "diff-after")
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 6 || !strings.HasSuffix(lines[4], " sleep 4242") || !strings.HasPrefix(lines[5], "1 added, 2 changed, 1 removed; 1 started, 0 gone; ") {
		t.Fatalf("the command says:\n%s", out)
	}
	if diff := cmp.Diff([]string{"M /etc/hosts (content, in memory)", "M /etc/passwd (mode)", "A /root/diff/comes", "D /root/diff/goes"}, lines[:4]); diff != "" {
		t.Error(diff)
	}
	branch := strings.TrimSpace(c.ok("fork", "diff-before", "-q"))
	endWithTest(t, c.s, branch)
	shell(t, c.s, branch, "echo other > /root/diff/other")
	c.ok("ckpt", "create", branch, "--name", "diff-branch")
	var d coppice.CheckpointDiff
	if err := json.Unmarshal([]byte(c.ok("--json", "ckpt", "diff", "diff-branch", "diff-after")), &d); err != nil {
		t.Fatal(err)
	}
	var changes []string
	for _, f := range d.Items {
		if f.InMemory {
			changes = append(changes, string(f.Change)+" "+f.Path)
		}
		if strings.HasPrefix(f.Path, "/root/diff/") { // a fork's identity may be among the rest
			changes = append(changes, string(f.Change)+" "+f.Path)
		}
	}
	if diff := cmp.Diff([]string{"changed /etc/hosts", "added /root/diff/comes", "removed /root/diff/goes", "removed /root/diff/other"}, changes); diff != "" {
		t.Error(diff)
	}
	if !d.FilesComplete || d.IdentityUnknown || d.Unreadable > 0 || d.MemoryChangedBytes == nil || *d.MemoryChangedBytes == 0 || d.Processes == nil || len(d.Processes.Started) == 0 {
		t.Errorf("%+v", d)
	}
	// A fork has the line that was written to /etc/hosts, and a name of its own; neither is a difference.
	child := strings.TrimSpace(c.ok("fork", "diff-after", "-q"))
	endWithTest(t, c.s, child)
	shell(t, c.s, child, "grep '^10.9.9.9' /etc/hosts")
	c.ok("ckpt", "create", child, "--name", "diff-child")
	if out := c.ok("ckpt", "diff", "diff-after", "diff-child"); strings.Contains(out, "in memory") || strings.Contains(out, "may be missing") {
		t.Errorf("a fork differs from its parent:\n%s", out)
	}
	for _, name := range []string{"diff-before", "diff-after", "diff-branch", "diff-child"} {
		c.ok("ckpt", "rm", name)
	}
}
