package postgres

import (
	"encoding/json"
	"fmt"
	"sync"

	"github.com/coppice-dev/coppice/api/runnerapi"
)

// JSON columns. Most are empty and a cluster has few runner classes; decoding each cell as if it were the first took most of
// the time of reading a page.

// object is a column with a JSON object; NULL is nil.
type object[V any] map[string]V

// ScanBytes implements pgtype.BytesScanner.
func (o *object[V]) ScanBytes(b []byte) error {
	if string(b) == "{}" {
		*o = object[V]{}
		return nil
	}
	*o = nil
	return decode(b, (*map[string]V)(o))
}

// array is a column with a JSON array; NULL is nil.
type array[E any] []E

// ScanBytes implements pgtype.BytesScanner.
func (a *array[E]) ScanBytes(b []byte) error {
	if string(b) == "[]" {
		*a = array[E]{}
		return nil
	}
	*a = nil
	return decode(b, (*[]E)(a))
}

// classCell is a column with a runner class, which is shared and never written to; NULL is nil.
type classCell struct{ *runnerapi.RunnerClass }

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
func (c *classCell) ScanBytes(b []byte) (err error) {
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
