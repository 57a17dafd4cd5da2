package e2e

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/internal/test/eventually"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestOldCheckpointNewPolicy (T33): a checkpoint from before a host was taken out and a grant was revoked brings neither back, forked or
// restored in place: not for programs that go on, nor for root in the guest with what it finds in the memory and files of before.
func TestOldCheckpointNewPolicy(t *testing.T) {
	g := newGranted(t)
	g.useCurl(g.root)
	found := "export ONE=" + shell(t, g.s, g.root, `printf %s "$ONE"`) + " TWO=" + shell(t, g.s, g.root, `printf %s "$TWO"`) +
		" TWO_BASE_URL=" + shell(t, g.s, g.root, `printf %s "$TWO_BASE_URL"`) + "; "
	shell(t, g.s, g.root, "cat > /root/found <<'END'\n"+found+"\nEND")
	old := checkpoint(t, g.s, g.root)
	g.useCurl(fork(t, g.s, old.ID, coppiceFork{})[0].Workspace.ID) // before: as its parent

	if _, err := g.s.client.PatchWorkspace(t.Context(), g.root, coppice.PatchWorkspaceRequest{Network: &coppice.NetworkPatch{Allow: &[]string{"b.example.com"}}}); err != nil {
		t.Fatal(err)
	}
	if err := g.s.client.RevokeGrant(t.Context(), g.root, "two"); err != nil {
		t.Fatal(err)
	}
	denied := func(ws coppice.WorkspaceID) {
		t.Helper()
		w, err := g.s.client.Workspace(t.Context(), ws)
		if err != nil || !slices.Equal(w.Network.Allow, []string{"b.example.com"}) {
			t.Errorf("it may reach %q, %v", w.Network.Allow, err)
		}
		if out := g.cli.ok("grant", "ls", ws); strings.Contains(out, "two") {
			t.Errorf("it has the grant that was revoked: %s", out)
		}
		g.refused(ws,
			useHeader, useBase,
			". /root/found; "+useHeader, ". /root/found; "+useBase,
			"curl -sS -m 10 https://a.example.com/", "curl -sS -m 10 http://a.example.com/", "curl -sS -m 10 --noproxy '*' https://a.example.com/",
			"curl -sS -m 10 --noproxy '*' -k --resolve a.example.com:443:"+g.o.Addr+" https://a.example.com/",
		)
		if got := g.say(ws, "curl -sS -m 20 http://b.example.com/still"); !strings.Contains(got, "GET b.example.com/still") {
			t.Errorf("what is still allowed: %s", got)
		}
	}
	denied(fork(t, g.s, old.ID, coppiceFork{})[0].Workspace.ID)
	request := coppiceFork{}.request()
	request.Network = coppice.NetworkRequest{Allow: &[]string{"a.example.com", "b.example.com"}}
	if _, err := g.s.client.ForkCheckpoint(t.Context(), old.ID, request); !errors.Is(err, coppice.Code("EGRESS_BEYOND_PARENT")) {
		t.Errorf("a fork that asks for the host: %v", err)
	}
	if _, err := g.s.client.RestoreWorkspace(t.Context(), g.root, old.ID); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "nothing is pending", func() bool {
		w, err := g.s.client.Workspace(t.Context(), g.root)
		return err == nil && !w.Network.RulesPending
	})
	denied(g.root)
}

// TestOneTimeThings (T35): what may exist once only is cloned by a fork as everything is, and a hook of the reseal takes it away before
// any program of the fork runs. Both are shown: without the hook the clones are the same client with the same token.
func TestOneTimeThings(t *testing.T) {
	s := theStack(t)
	ws := forkOne(t, s, seed(t))
	// A service that says who it is, again and again, with a token that its provider takes once.
	shell(t, s, ws, "mkdir -p /var/lib/app; echo client-1 > /var/lib/app/client; echo refresh-1 > /var/lib/app/token")
	launch(t, s, ws, "/bin/sh", "-c", `while :; do echo "$(cat /var/lib/app/client) $(cat /var/lib/app/token 2>/dev/null || echo none)" >> /var/lib/app/said; sleep 0.05; done`)
	said := func(ws coppice.WorkspaceID) []string {
		t.Helper()
		eventually.True(t, "the service says something", func() bool { return shell(t, s, ws, "cat /var/lib/app/said 2>/dev/null || :") != "" })
		return slices.Compact(strings.Split(strings.TrimSpace(shell(t, s, ws, "cat /var/lib/app/said")), "\n"))
	}
	who := func(from coppice.CheckpointID) []string {
		t.Helper()
		var out []string
		for _, c := range fork(t, s, from, coppiceFork{count: 2}) {
			shell(t, s, c.Workspace.ID, "cp /var/lib/app/said /root/before; : > /var/lib/app/said")
			out = append(out, said(c.Workspace.ID)...)
		}
		return out
	}
	said(ws) // a checkpoint before that has no file yet
	if got := who(checkpoint(t, s, ws).ID); !slices.Equal(got, []string{"client-1 refresh-1", "client-1 refresh-1"}) {
		t.Errorf("clones without a hook say %q: this test shows nothing", got)
	}
	hook(t, s, ws, "50-app", `rm -f /var/lib/app/token; echo "client-$COPPICE_GENERATION" > /var/lib/app/client; : > /var/lib/app/said`)
	children := fork(t, s, checkpoint(t, s, ws).ID, coppiceFork{count: 2})
	for _, c := range children {
		var lines []string
		eventually.True(t, "the service says something more", func() bool {
			lines = strings.Split(strings.TrimSpace(shell(t, s, c.Workspace.ID, "cat /var/lib/app/said")), "\n")
			return len(lines) > 2
		})
		// The first line may have been begun before the capture.
		if got, want := slices.Compact(lines[1:]), []string{"client-" + c.Workspace.Network.Generation + " none"}; !slices.Equal(got, want) {
			t.Errorf("%s says %q after the fork, want %q", c.Workspace.Name, got, want)
		}
	}
	shell(t, s, ws, ": > /var/lib/app/said")
	if got := said(ws); !slices.Equal(got, []string{"client-1 refresh-1"}) {
		t.Errorf("the parent says %q", got)
	}
}
