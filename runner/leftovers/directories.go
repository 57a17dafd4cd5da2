package leftovers

import (
	"errors"
	"os"
	"sync"
)

// Directories removes the directories of shells. To remove a directory, the process needs a descriptor, and shells often fail because there
// is none left. So Directories remembers those that it cannot remove now, for RemoveAgain. The next runner removes the rest when it starts.
// The zero value is ready for use. It is safe for concurrent use.
type Directories struct {
	mu   sync.Mutex // guards left
	left []string
}

// Remove removes directories.
func (d *Directories) Remove(paths ...string) error {
	var errs []error
	for _, path := range paths {
		if err := os.RemoveAll(path); err != nil {
			errs = append(errs, err)
			d.mu.Lock()
			d.left = append(d.left, path)
			d.mu.Unlock()
		}
	}
	return errors.Join(errs...)
}

// RemoveAgain removes what Remove could not remove, and returns how many directories that were.
func (d *Directories) RemoveAgain() (n int, err error) {
	d.mu.Lock()
	left := d.left
	d.left = nil
	d.mu.Unlock()
	return len(left), d.Remove(left...)
}
