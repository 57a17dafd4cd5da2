package pager

import "github.com/hanwen/go-fuse/v2/fs"

// pushChunk is how much the kernel is given at once.
const pushChunk = 256 << 10

// push begins to give the kernel what machines of a file will ask for.
func (s *Server) push(n *fileNode) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.done.Err() == nil {
		s.pushes.Go(func() { n.image.push(&n.Inode) })
	}
}

// push gives the kernel the pages of want, so that it need not ask: a page that is in its cache is mapped with those beside it, without a word
// to this process. Nothing depends on it.
func (im *image) push(node *fs.Inode) {
	buf := make([]byte, pushChunk)
	for _, r := range im.want {
		first := max(r.First, 0)
		last := min(r.First+min(r.Count, im.tree.Pages()), im.tree.Pages()) - 1
		for p := first; p <= last && im.ctx.Err() == nil; {
			end := p
			for end <= last && end-p < pushChunk/pageSize && im.has(end) {
				end++
			}
			if end == p {
				p++ // its frame has not come
				continue
			}
			off := p * pageSize
			n := min((end-p)*pageSize, im.tree.Size()-off)
			if _, err := im.part.ReadAt(buf[:n], off); err != nil || node.WriteCache(off, buf[:n]) != 0 {
				return // it is read when it is asked for
			}
			p = end
		}
	}
}
