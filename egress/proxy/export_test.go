package proxy

import "github.com/coppice-dev/coppice/core"

// Held returns the number of connections and flows of a sandbox.
func (s *Server) Held(id core.SandboxID) (conns, flows int) {
	b := s.sandbox(id)
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.conns), len(b.open)
}

// Budgets is how many grants of a sandbox have a budget.
func (s *Server) Budgets(id core.SandboxID) int {
	b := s.sandbox(id)
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.budgets)
}
