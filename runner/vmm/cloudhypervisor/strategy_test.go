package cloudhypervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
)

func TestStrategyFor(t *testing.T) {
	t.Parallel()
	for version, ok := range map[string]bool{
		"53.0": true, "53.0.1": true, "53.9": true, "52.0": false, "5.30": false, "0.7": false, "54.0": false, "530.0": false,
	} {
		err := Check(version)
		if (err == nil) != ok {
			t.Errorf("%s: %v", version, err)
		}
		if err != nil && (core.CodeOf(err) != core.CodeVMMFailed || !strings.Contains(core.MessageOf(err), version) || !strings.Contains(core.MessageOf(err), "make setup-kvm")) {
			t.Errorf("%s: the error does not say what to do: %v", version, err)
		}
	}
}

// chain is v53.0's error for a memory-ranges that exists.
func chain(last string, file string) []string {
	return []string{
		"Error from API", "The VM could not be snapshotted", "Cannot send VM snapshot", "Failed to send migratable component snapshot",
		fmt.Sprintf("Error creating memory snapshot file %q", "/proc/self/fd/5/"+file), last,
	}
}

func TestMetPlaceholder(t *testing.T) {
	t.Parallel()
	const exists = "File exists (os error 17)"
	for name, c := range map[string]struct {
		err  error
		want bool
	}{
		"the one":             {&refusal{500, chain(exists, memoryFile)}, true},
		"wrapped":             {fmt.Errorf("x: %w", &refusal{500, chain(exists, memoryFile)}), true},
		"another file":        {&refusal{500, chain(exists, stateFile)}, false},
		"a name that ends so": {&refusal{500, chain(exists, "my-"+memoryFile)}, false},
		"another error":       {&refusal{500, chain("No space left on device (os error 28)", memoryFile)}, false},
		"another status":      {&refusal{404, chain(exists, memoryFile)}, false},
		"one line":            {&refusal{500, []string{exists}}, false},
		"nothing":             {&refusal{500, nil}, false},
		"no refusal":          {errors.New(exists), false},
		"no error":            {nil, false},
	} {
		if got := metPlaceholder(c.err); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// savedClock has all flags set.
const savedClock = "1,2,3,4,5,6,7,255,255,1,2,3,0,0,0,0,5,154,75,80,25,214,202,24,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0"

// captured is a state with numbers that a float64 cannot hold, and characters that an encoder may change.
func captured(t *testing.T) []byte {
	t.Helper()
	manager := `{"memory_ranges":{"data":[{"gpa":0,"length":134217728}]},"guest_ram_mappings":[{"slot":0,"zone_id":"mem0"}],"end":18446744073709551615}`
	vm := `{"clock":{"Kvm":[` + savedClock + `]},"common_cpuid":[{"x":"<&>"}]}`
	b, err := json.Marshal(map[string]any{
		"snapshots": map[string]any{
			"memory-manager": map[string]any{"snapshots": map[string]any{}, "snapshot_data": map[string]string{"state": manager}},
			"cpu-manager": map[string]any{"snapshots": map[string]any{
				"0": map[string]any{"snapshots": map[string]any{}, "snapshot_data": map[string]string{"state": `{"msr":18446744073709551615,"s":"\u003c\\"}`}},
			}, "snapshot_data": nil},
			"device-manager": map[string]any{"snapshots": map[string]any{}, "snapshot_data": map[string]string{"state": `{"device_id_cnt":"1"}`}},
		},
		"snapshot_data": map[string]string{"state": vm},
	})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestRestorable(t *testing.T) {
	t.Parallel()
	out, err := placeholder{}.restorable(captured(t))
	if err != nil {
		t.Fatal(err)
	}
	var was, is node
	if err := errors.Join(json.Unmarshal(captured(t), &was), json.Unmarshal(out, &is)); err != nil {
		t.Fatal(err)
	}
	fields := func(n *node) map[string]string {
		raw := map[string]json.RawMessage{}
		if err := json.Unmarshal([]byte(n.Data.State), &raw); err != nil {
			t.Fatal(err)
		}
		out := map[string]string{}
		for k, v := range raw {
			out[k] = string(v)
		}
		return out
	}
	if diff := cmp.Diff(string(was.Snapshots), string(is.Snapshots)); diff != "" {
		t.Errorf("the components have changed:\n%s", diff)
	}
	root := fields(&is)
	if want := fields(&was)["common_cpuid"]; root["common_cpuid"] != want {
		t.Errorf("the CPUID is %s, was %s", root["common_cpuid"], want)
	}
	if want := `{"Kvm":[` + strings.Replace(savedClock, "255,255", "255,251", 1) + `]}`; root["clock"] != want {
		t.Errorf("the clock is %s, want %s", root["clock"], want)
	}
	again, err := placeholder{}.restorable(out)
	if diff := cmp.Diff(string(out), string(again)); err != nil || diff != "" {
		t.Errorf("the second time it is another (%v):\n%s", err, diff)
	}
}

func TestNotRestorable(t *testing.T) {
	t.Parallel()
	good := string(captured(t))
	for name, state := range map[string]string{
		"empty":            "",
		"cut short":        good[:len(good)/2],
		"no JSON":          "QEVM",
		"another":          `{"a":1}`,
		"null":             `null`,
		"no data":          `{"snapshots":{"cpu-manager":null,"memory-manager":null,"device-manager":null}}`,
		"no CPUs":          strings.Replace(good, "cpu-manager", "cpu-menager", 1),
		"no devices":       strings.Replace(good, "device-manager", "devise-manager", 1),
		"a clock of words": strings.Replace(good, `[1,2,3,4`, `["a",2,3,4`, 1),
		"a shorter clock":  strings.Replace(good, `[1,2,3,4`, `[3,4`, 1),
	} {
		if _, err := (placeholder{}).restorable([]byte(state)); core.CodeOf(err) != core.CodeCheckpointCorrupt {
			t.Errorf("%s: got %v, want CHECKPOINT_CORRUPT", name, err)
		}
	}
}

func FuzzRestorable(f *testing.F) {
	f.Add([]byte(`{"snapshots":{"cpu-manager":null,"memory-manager":{},"device-manager":[]},"snapshot_data":{"state":"{\"clock\":{\"Kvm\":[` + savedClock + `]}}"}}`))
	f.Add([]byte(`{"snapshots":{"memory-manager":null},"snapshot_data":null}`))
	f.Fuzz(func(t *testing.T, state []byte) {
		out, err := placeholder{}.restorable(state)
		if err != nil {
			return
		}
		again, err := placeholder{}.restorable(out)
		if err != nil || string(again) != string(out) {
			t.Errorf("what it has made of %q it makes %q of (%v)", out, again, err)
		}
	})
}

// answering returns an api whose other end calls do and then answers.
func answering(t *testing.T, do func(), answer string) api {
	t.Helper()
	dir, err := os.MkdirTemp("", "ch") //nolint:usetesting // t.TempDir is too long for the path of a unix socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "api")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Read(make([]byte, 4096))
			do()
			_, _ = c.Write([]byte(answer))
			_ = c.Close()
		}
	}()
	return api{path}
}

func refusing(status int, said []string) string {
	b, _ := json.Marshal(said) //nolint:errchkjson // strings
	return fmt.Sprintf("HTTP/1.1 %d \r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", status, len(b), b)
}

// TestCapture uses a VMM that does the right things to its directory, and things that must do no harm.
func TestCapture(t *testing.T) {
	t.Parallel()
	const placeholderMet = "File exists (os error 17)"
	good := string(captured(t))
	met := refusing(500, chain(placeholderMet, memoryFile))
	for name, c := range map[string]struct {
		files  map[string]string // "-> x" is a link
		answer string
		want   string // in the error; "" for success
	}{
		"as it should":       {map[string]string{configFile: "{}", stateFile: good}, met, ""},
		"no state":           {map[string]string{configFile: "{}"}, met, "did not write state.json"},
		"no config":          {map[string]string{stateFile: good}, met, "did not write config.json"},
		"state cut short":    {map[string]string{configFile: "{}", stateFile: good[:100]}, met, "the file state.json of a snapshot, with 100 bytes, is not complete"},
		"config cut short":   {map[string]string{configFile: "{", stateFile: good}, met, "is not complete"},
		"a link out":         {map[string]string{configFile: "{}", stateFile: "-> /etc/passwd"}, met, "is not a regular file"},
		"a link within":      {map[string]string{configFile: "{}", stateFile: "-> config.json"}, met, "is not a regular file"},
		"a snapshot":         {map[string]string{configFile: "{}", stateFile: good}, "HTTP/1.1 204 \r\n\r\n", "wrote a complete snapshot"},
		"a full disk":        {nil, refusing(500, chain("No space left on device (os error 28)", memoryFile)), "No space left"},
		"a long state":       {map[string]string{configFile: "{}", stateFile: good + strings.Repeat(" ", maxState+1-len(good))}, met, "is not a regular file of at most"},
		"a long config":      {map[string]string{configFile: "{}" + strings.Repeat(" ", maxState-1), stateFile: good}, met, "is not a regular file of at most"},
		"the longest config": {map[string]string{configFile: "{}" + strings.Repeat(" ", maxState-2), stateFile: good}, met, ""},
		"the state is there": {map[string]string{configFile: "{}"}, refusing(500, chain(placeholderMet, stateFile)), "refused vm.snapshot"},
	} {
		dir := t.TempDir()
		// Leftovers of an earlier snapshot do not matter.
		if err := os.WriteFile(filepath.Join(dir, stateFile), []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
		own, err := os.OpenRoot(dir)
		if err != nil {
			t.Fatal(err)
		}
		a := answering(t, func() {
			for file, content := range c.files {
				if to, link := strings.CutPrefix(content, "-> "); link {
					_ = os.Symlink(to, filepath.Join(dir, file))
					continue
				}
				_ = os.WriteFile(filepath.Join(dir, file), []byte(content), 0o600)
			}
		}, c.answer)
		got, err := placeholder{}.capture(t.Context(), a, own)
		switch {
		case c.want == "" && (err != nil || string(got) != good):
			t.Errorf("%s: got %d bytes, %v", name, len(got), err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: got %v, want %q", name, err, c.want)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("%s: %v are left (%v)", name, left, err)
		}
		if err := own.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestStateIsBounded: device state that is too long is not read. The state of a checkpoint may come from another host.
func TestStateIsBounded(t *testing.T) {
	t.Parallel()
	for size, want := range map[int64]core.Code{maxState: "", maxState + 1: core.CodeCheckpointCorrupt} {
		f, err := os.Create(filepath.Join(t.TempDir(), stateFile))
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Truncate(size); err != nil {
			t.Fatal(err)
		}
		b, err := readAll(f)
		if want == "" && (err != nil || int64(len(b)) != size) || want != "" && (core.CodeOf(err) != want || len(b) > 0) {
			t.Errorf("%d bytes: %d were read, %v", size, len(b), err)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestAPI(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer string
		want   string
	}{
		"no content":      {"HTTP/1.1 204 \r\n\r\n", ""},
		"a chain":         {refusing(500, []string{"Error from API", "The VM could not boot", "no\x1b[31mkernel"}), "refused vm.boot with status 500: it says Error from API: The VM could not boot: no?[31mkernel"},
		"no chain":        {"HTTP/1.1 400 \r\nContent-Length: 4\r\n\r\nwhat", "status 400: it says what"},
		"nothing":         {"HTTP/1.1 404 \r\n\r\n", "status 404: it says nothing more"},
		"no answer":       {"", "did not answer vm.boot"},
		"no HTTP":         {"SSH-2.0-x\r\n\r\n", "did not answer vm.boot"},
		"cut short":       {"HTTP/1.1 500 \r\nContent-Length: 400\r\n\r\n[\"Err", "did not answer vm.boot"},
		"without an end":  {"HTTP/1.1 200 \r\nContent-Length: 99999999\r\n\r\n" + strings.Repeat("x", 2*maxAnswer), "did not answer vm.boot"},
		"endless headers": {"HTTP/1.1 200 \r\n" + strings.Repeat("X: y\r\n", maxAnswer), "did not answer vm.boot"},
	} {
		err := answering(t, func() {}, c.answer).put(t.Context(), "vm.boot", nil)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", name, err, c.want)
		}
	}
	stuck := make(chan struct{})
	a := answering(t, func() { <-stuck }, "")
	defer close(stuck)
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	if err := a.put(ctx, "vm.boot", nil); !errors.Is(err, why) {
		t.Errorf("got %v, want the cause", err)
	}
}
