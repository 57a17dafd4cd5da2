package pgtx

import (
	"encoding/json"
	"fmt"
	"sync"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// JSON columns. Most are empty and a cluster has few runner classes; decoding each cell as if it were the first took most of
// the time of reading a page.

// Object is a column with a JSON object; NULL is nil.
type Object[V any] map[string]V

// ScanBytes implements pgtype.BytesScanner.
func (o *Object[V]) ScanBytes(b []byte) error {
	if string(b) == "{}" {
		*o = Object[V]{}
		return nil
	}
	*o = nil
	return decode(b, (*map[string]V)(o))
}

// Array is a column with a JSON array; NULL is nil.
type Array[E any] []E

// ScanBytes implements pgtype.BytesScanner.
func (a *Array[E]) ScanBytes(b []byte) error {
	if string(b) == "[]" {
		*a = Array[E]{}
		return nil
	}
	*a = nil
	return decode(b, (*[]E)(a))
}

// ClassCell is a column with a runner class, which is shared and never written to; NULL is nil.
type ClassCell struct{ *runnerapi.RunnerClass }

// The cache of classes: more than a cluster has. A runner may say anything of its class, so longer ones are decoded each time.
const (
	maxClasses   = 1000
	maxClassText = 8 << 10 // bytes of JSON
)

// classCache is the classes that were decoded, by their JSON.
type classCache struct {
	mu   sync.RWMutex // guards what follows
	kept map[string]*runnerapi.RunnerClass
}

var classes = classCache{kept: map[string]*runnerapi.RunnerClass{}}

// of returns the class of some JSON.
func (c *classCache) of(b []byte) (*runnerapi.RunnerClass, error) {
	c.mu.RLock()
	class := c.kept[string(b)]
	c.mu.RUnlock()
	if class != nil {
		return class, nil
	}
	class = &runnerapi.RunnerClass{}
	if err := decode(b, class); err != nil {
		return nil, err
	}
	if len(b) > maxClassText {
		return class, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.kept) >= maxClasses {
		clear(c.kept)
	}
	c.kept[string(b)] = class
	return class, nil
}

// ScanBytes implements pgtype.BytesScanner.
func (c *ClassCell) ScanBytes(b []byte) (err error) {
	c.RunnerClass = nil
	if b != nil {
		c.RunnerClass, err = classes.of(b)
	}
	return err
}

func decode(b []byte, into any) error {
	if b == nil {
		return nil
	}
	if err := json.Unmarshal(b, into); err != nil {
		return fmt.Errorf("decode a JSON column: %w", err)
	}
	return nil
}

// ClassKey is the form of a runner class that an index can compare.
func ClassKey(c runnerapi.RunnerClass) string {
	return c.Arch + "/" + c.Accelerator + "/" + c.VMM + "/" + c.VMMVersion + "/" + c.MachineType + "/" + string(core.DigestOf([]byte(c.CPUModel)))
}
