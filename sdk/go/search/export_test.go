package search

// UnderWay counts what a searcher believes to have under way.
func (s *Search) UnderWay() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	var count func(*node) int
	count = func(n *node) int {
		sum := len(n.mine)
		for _, c := range n.children {
			sum += count(c)
		}
		return sum
	}
	return count(s.tree.root)
}
