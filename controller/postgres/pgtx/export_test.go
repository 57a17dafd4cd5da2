package pgtx

import "github.com/coppice-dev/coppice/api/runnerapi"

// Classes is a cache of runner classes.
type Classes struct{ c classCache }

// NewClasses returns an empty one.
func NewClasses() *Classes { return &Classes{classCache{kept: map[string]*runnerapi.RunnerClass{}}} }

// Of returns the class of some JSON.
func (c *Classes) Of(b []byte) (*runnerapi.RunnerClass, error) { return c.c.of(b) }

// Kept is how many classes the cache has.
func (c *Classes) Kept() int { return len(c.c.kept) }
