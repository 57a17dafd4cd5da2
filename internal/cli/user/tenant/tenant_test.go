package tenant

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/cli/clitest"
)

// TestTenantCommands runs the commands for projects, keys and their audit log: what they print, and what they send.
func TestTenantCommands(t *testing.T) {
	t.Parallel()
	f, run := clitest.NewServer(t, NewProjectCommand, NewKeyCommand, NewAuditCommand)
	for _, c := range []struct {
		line   string
		status int
		out    []string // parts of standard output, or of standard error when it fails
		sent   string   // as JSON
	}{
		{"project create blue --quota workspaces=7 --quota depth=0", 0, []string{"blue is created: " + clitest.ID("prj", 3), "coppice key create"}, `[{"name":"blue","quotas":{"depth":0,"workspaces":7}}]`},
		{"project create blue -q", 0, []string{clitest.ID("prj", 3)}, `[{"name":"blue"}]`},
		{"project create blue --quota nosuch=1", 2, []string{`there is no quota "nosuch"; the quotas are checkpoint_bytes, checkpoints, children, depth, forks_in_flight, keys, ports, workspaces`}, ""},
		{"project create blue --quota depth=many", 2, []string{"not a number"}, ""},
		{"project ls", 0, []string{"NAME", "blue     " + clitest.ID("prj", 2), "default"}, ""},
		{"project show", 0, []string{"default", "workspaces        1 of 10", "checkpoint bytes  4.0 GiB of 40.0 GiB", "keys              5 of 70"}, ""},
		{"project show blue", 0, []string{clitest.ID("prj", 2)}, ""},
		{"project show green", 66, []string{`there is no project "green"`}, ""},
		{"project quota blue keys=3 --version 4", 0, []string{"version"}, `[{"quotas":{"keys":3},"version":4}]`},
		{"project rm blue " + clitest.ID("prj", 1), 0, []string{clitest.ID("prj", 2) + " is deleted", clitest.ID("prj", 1) + " is deleted"}, `["delete ` + clitest.ID("prj", 2) + `","delete ` + clitest.ID("prj", 1) + `"]`},
		{"key create ci --scope workspace:read,key:write --ttl 24h", 0, []string{clitest.Secret + "\n", "is not shown again"}, `["` + clitest.ID("prj", 1) + `",{"name":"ci","scopes":["workspace:read","key:write"],"ttl_seconds":86400}]`},
		{"key create ci -q --project blue", 0, []string{clitest.Secret}, `["` + clitest.ID("prj", 2) + `",{"name":"ci"}]`},
		{"key create ci --ttl 1ms", 2, []string{"whole number of seconds"}, ""},
		{"key ls", 0, []string{"ci", "mine", "workspace:read key:write"}, ""},
		{"key ls --all", 0, []string{"gone  revoked", "late  expired"}, ""},
		{"key show", 0, []string{"mine", "valid"}, ""},
		{"key show ci", 0, []string{clitest.ID("key", 2)}, ""},
		{"key show gone", 66, []string{`there is no valid key "gone"`}, ""},
		{"key show " + clitest.ID("key", 9), 66, []string{"KEY_NOT_FOUND"}, ""},
		{"key revoke ci", 0, []string{clitest.ID("key", 2) + " is revoked"}, `["revoke ` + clitest.ID("key", 2) + `"]`},
		{"audit", 0, []string{"key 00000001", "192.0.2.7", "forkCheckpoint", "- > ready", "succeeded"}, `["audit of "]`},
		{"audit --project blue", 0, []string{"forkCheckpoint"}, `["audit of ` + clitest.ID("prj", 2) + `"]`},
		{"audit --project system --json", 0, []string{`"forkCheckpoint"`}, `["audit of ` + clitest.ID("prj", 0) + `"]`},
		{"audit --project green", 66, []string{`there is no project "green"`}, ""},
		{"audit check", 0, []string{"Intact", "abcd"}, `["check of "]`},
		{"audit check --project system", 1, []string{"the audit log was tampered with: seal 7"}, `["check of ` + clitest.ID("prj", 0) + `"]`},
		{"--json key revoke ci", 0, []string{`"` + clitest.ID("key", 2) + `"`}, `["revoke ` + clitest.ID("key", 2) + `"]`},
		{"--json key create ci", 0, []string{`"secret": "` + clitest.Secret + `"`}, `["` + clitest.ID("prj", 1) + `",{"name":"ci"}]`},
	} {
		f.Requests = nil
		status, stdout, stderr := run(strings.Fields(c.line)...)
		text := stdout
		if c.status != 0 {
			text = stderr
		}
		if status != c.status {
			t.Errorf("%s: status %d, %s%s", c.line, status, stdout, stderr)
		}
		for _, part := range c.out {
			if !strings.Contains(text, part) {
				t.Errorf("%s: no %q in\n%s", c.line, part, text)
			}
		}
		sent, err := json.Marshal(f.Requests)
		if err != nil {
			t.Fatal(err)
		}
		if want := c.sent; want != "" && string(sent) != want {
			t.Errorf("%s sent %s, want %s", c.line, sent, want)
		} else if want == "" && f.Requests != nil {
			t.Errorf("%s sent %s", c.line, sent)
		}
	}
	if _, stdout, _ := run("key", "ls"); strings.Contains(stdout, "gone") || strings.Contains(stdout, "late") {
		t.Errorf("ended keys are listed:\n%s", stdout)
	}
}
