package pager

import "github.com/hanwen/go-fuse/v2/fs"

// pushChunk is the number of bytes that are given to the kernel at once.
const pushChunk = 256 << 10

// push begins to give the kernel the pages that machines of a file will read.
func (s *Server) push(n *fileNode) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.done.Err() == nil {
		s.pushes.Go(func() { n.image.push(&n.Inode) })
	}
}

// push gives the kernel the pages of want, so that it need not ask for them. The kernel maps a cached page, together
// with its cached neighbours, without a request to this process. Nothing depends on it.
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
				p++ // its frame has not arrived
				continue
			}
			off := p * pageSize
			n := min((end-p)*pageSize, im.tree.Size()-off)
			if _, err := im.part.ReadAt(buf[:n], off); err != nil || node.WriteCache(off, buf[:n]) != 0 {
				return // the kernel will ask for it
			}
			p = end
		}
	}
}
