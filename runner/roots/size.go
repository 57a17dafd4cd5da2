package roots

import (
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// StoredBytes is how many bytes the root file systems from the object store take.
func (s *Store) StoredBytes() (n int64) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return 0
	}
	for _, e := range entries {
		if Key(e.Name()).Stored() {
			n += allocated(filepath.Join(s.dir, e.Name()))
		}
	}
	return n
}

// Freeable is how many bytes are freed when every root file system is removed except those that stay. It also counts files that are still to
// be collected.
func (s *Store) Freeable(stay map[Key]bool) (n int64, err error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return 0, err
	}
	for _, e := range entries {
		if key, ok := strings.CutSuffix(e.Name(), suffix); !ok || !stay[Key(key)] {
			n += allocated(filepath.Join(s.dir, e.Name()))
		}
	}
	return n, nil
}

// allocated is how many bytes a file takes on disk; 0 if there is no file.
func allocated(path string) int64 {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return 0
	}
	return st.Blocks * 512
}
