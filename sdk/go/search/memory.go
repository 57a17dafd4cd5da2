package search

import (
	"context"
	"sync"
)

// Memory is a Store in memory: to try a strategy on a simulated problem. Its zero value is ready to use.
type Memory struct {
	mu    sync.Mutex // guards the field below
	nodes map[string]remembered
}

type remembered struct {
	parent  string
	record  Record
	version int64
}

// Add makes a node, as a checkpoint with a record is made.
func (m *Memory) Add(parent, id string, r Record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.nodes == nil {
		m.nodes = map[string]remembered{}
	}
	m.nodes[id] = remembered{parent: parent, record: r.clone(), version: 1}
}

// Load returns the record of a node. A node that was never added has an empty one.
func (m *Memory) Load(_ context.Context, id string) (Record, int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	at := m.nodes[id]
	return at.record.clone(), max(at.version, 1), nil
}

// Save replaces the record of a node.
func (m *Memory) Save(_ context.Context, id string, version int64, r Record) (int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	at := m.nodes[id]
	if version != max(at.version, 1) {
		return 0, ErrConflict
	}
	if m.nodes == nil {
		m.nodes = map[string]remembered{}
	}
	m.nodes[id] = remembered{at.parent, r.clone(), version + 1}
	return version + 1, nil
}

// Children returns the nodes that were added below a node.
func (m *Memory) Children(_ context.Context, id string) (map[string]Record, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[string]Record{}
	for child, at := range m.nodes {
		if at.parent == id {
			out[child] = at.record.clone()
		}
	}
	return out, nil
}
