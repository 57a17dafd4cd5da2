package arrakis

import (
	"context"
	"encoding/json"
	"errors"
	"path"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller/compat/shared"
)

func FuzzName(f *testing.F) {
	for _, s := range []string{"my-vm", "My_VM.2", "", "..", "a/b", "arrakis--x", "\xff", "é", strings.Repeat("a", 64), "a\u200b"} {
		f.Add(s, s+"x")
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		if checkName("vm name", a, maxName) == nil && (a == "" || len(a) > maxName || path.Join("/vms", a) != "/vms/"+a) {
			t.Errorf("%q is accepted", a)
		}
		for _, name := range []string{a, b} {
			if !legal.MatchString(coppiceName(name)) {
				t.Errorf("%q becomes %q", name, coppiceName(name))
			}
		}
		if a != b && coppiceName(a) == coppiceName(b) {
			t.Errorf("%q and %q become the same name", a, b)
		}
	})
}

func FuzzPlace(f *testing.F) {
	for _, s := range []string{"a", "/a", "../../etc", "", "\x00", "a//b/./c"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		at, bad := place(name)
		if bad == nil && (!path.IsAbs(at) || path.Clean(at) != at || len(at) > maxPath+len(directory)+1) {
			t.Errorf("%q is at %q", name, at)
		}
	})
}

func FuzzPorts(f *testing.F) {
	for _, s := range []string{"5901=gui,5736-5740=code", "1-65535", "-", ",,", "8=a=b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, list string) {
		ports, err := ParsePorts(list)
		seen := map[int]bool{}
		for _, p := range ports {
			if p.Guest < 1 || p.Guest > lastPort || seen[p.Guest] {
				t.Errorf("%q: %+v", list, ports)
			}
			seen[p.Guest] = true
		}
		if len(ports) > maxPorts || err != nil && ports != nil {
			t.Errorf("%q: %d ports, %v", list, len(ports), err)
		}
	})
}

func FuzzBody(f *testing.F) {
	for _, s := range []string{`{"vmName":"a"}`, ``, ` `, `[]`, `{"vmName":1}`, `{"VMNAME":"a","x":[{}]}`, "{}x", "null"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var q startRequest
		err := readJSON(body, &q)
		if err != nil && !errors.As(err, new(*shared.StatusError)) {
			t.Errorf("%q: %v", body, err)
		}
		if err == nil && !json.Valid(body) {
			t.Errorf("%q was accepted", body)
		}
	})
}

// Each key has so many requests with files at the same time; more wait, and nothing is kept of those that have ended.
func TestTransfersAreBounded(t *testing.T) {
	t.Parallel()
	var all transfers
	enter := func(ctx context.Context, key string) func() {
		leave, err := all.enter(ctx, key)
		if err != nil {
			return nil
		}
		return leave
	}
	var leaves []func()
	for range maxTransfers {
		leaves = append(leaves, enter(t.Context(), "a"))
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if enter(ended, "a") != nil {
		t.Error("one more than the bound was served")
	}
	waited := make(chan func())
	go func() { waited <- enter(t.Context(), "a") }()
	leave := enter(t.Context(), "b") // another key does not wait
	leaves[0]()
	leaves[0] = <-waited
	for _, l := range append(leaves, leave) {
		l()
	}
	if len(all.keys) != 0 {
		t.Errorf("%d keys are kept", len(all.keys))
	}
}
