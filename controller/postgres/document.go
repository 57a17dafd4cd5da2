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

const maxClasses = 1000 // of more than a cluster has

var (
	classesMu sync.RWMutex // guards classes
	classes   = map[string]*runnerapi.RunnerClass{}
)

// ScanBytes implements pgtype.BytesScanner.
func (c *classCell) ScanBytes(b []byte) error {
	c.RunnerClass = nil
	if b == nil {
		return nil
	}
	classesMu.RLock()
	c.RunnerClass = classes[string(b)]
	classesMu.RUnlock()
	if c.RunnerClass != nil {
		return nil
	}
	class := &runnerapi.RunnerClass{}
	if err := decode(b, class); err != nil {
		return err
	}
	c.RunnerClass = class
	classesMu.Lock()
	defer classesMu.Unlock()
	if len(classes) >= maxClasses {
		clear(classes)
	}
	classes[string(b)] = class
	return nil
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
