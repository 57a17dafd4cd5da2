package connections

import (
	"fmt"
	"path/filepath"
	"sync"
	"testing"
)

// TestEntriesOfManyServers enters servers at the same time: no entry is lost, and each takes only its own away.
func TestEntriesOfManyServers(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "deep", "connection.json")
	const servers = 8
	entries, names := make([]Entry, servers), make([]string, servers)
	var group sync.WaitGroup
	for i := range servers {
		entries[i] = Entry{Server: fmt.Sprintf("http://127.0.0.1:%d", i+1), Token: fmt.Sprint(i), DataDir: fmt.Sprint("/data", i)}
		group.Go(func() {
			if err := Change(path, func(f *File) error {
				names[i] = f.Enter(entries[i], func(Entry) bool { return true })
				return nil
			}); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	f, err := Read(path)
	if err != nil || len(f.Contexts) != servers || f.Current != DevName || f.Server != f.Contexts[DevName].Server || f.Token != f.Contexts[DevName].Token {
		t.Fatalf("%+v, %v", f, err)
	}
	// A server that starts again on its data directory takes its own place, whatever its port.
	again := entries[3]
	again.Server = "http://127.0.0.1:99"
	if err := Change(path, func(f *File) error {
		if got := f.Enter(again, func(Entry) bool { return true }); got != names[3] {
			t.Errorf("it is %q now, and was %q", got, names[3])
		}
		f.Leave(names[3], entries[3]) // the end of the one before comes late
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if f, err = Read(path); err != nil || len(f.Contexts) != servers || f.Contexts[names[3]] != again {
		t.Errorf("%+v, %v", f, err)
	}
	for i := range servers {
		if err := Change(path, func(f *File) error {
			f.Leave(names[i], f.Contexts[names[i]])
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	if f, err = Read(path); err != nil || len(f.Contexts) != 0 || f.Server != "" || f.Token != "" {
		t.Errorf("after all have ended: %+v, %v", f, err)
	}
}

// TestEnterKeepsContextsOfTheUser: an entry without a data directory is the user's, also if a `coppice dev` listens at its address.
func TestEnterKeepsContextsOfTheUser(t *testing.T) {
	t.Parallel()
	mine := Entry{Server: "http://127.0.0.1:7070", Token: "mine"}
	f := File{Current: "work", Contexts: map[string]Entry{"work": mine, "also": mine}}
	name := f.Enter(Entry{Server: mine.Server, Token: "dev", DataDir: "/data"}, func(Entry) bool { return true })
	if name != DevName || len(f.Contexts) != 3 || f.Contexts["work"] != mine || f.Contexts["also"] != mine || f.Current != "work" {
		t.Errorf("%q, %+v", name, f)
	}
}
