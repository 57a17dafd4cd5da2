package netns

import "context"

// reset makes a released space as new: everything that a sandbox, or a VMM that was taken over, may have changed is
// deleted and made again, which is simpler to trust than to inspect.
func (s *space) reset(ctx context.Context) error {
	if err := s.verifyEmpty(); err != nil {
		return err
	}
	return s.inside(func() error {
		if err := s.flushConnections(); err != nil {
			return err
		}
		if err := s.awaitNoSockets(ctx); err != nil {
			return err
		}
		if err := s.strip(); err != nil {
			return err
		}
		if err := s.furnish(); err != nil {
			return err
		}
		return s.verify(ctx)
	})
}
