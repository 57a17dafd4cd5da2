package netns

import (
	"errors"
	"fmt"
	"time"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// netlinkPatience bounds the wait for the kernel's answer. It answers at once or not at all.
const netlinkPatience = 10 * time.Second

// tablesConn is a connection to the nftables of one namespace.
type tablesConn struct {
	nft *nftables.Conn
	raw *netlink.Conn // of the same socket
}

// dialTables connects to the nftables of the calling thread's namespace; the connection stays there.
func dialTables() (*tablesConn, error) {
	var raw *netlink.Conn
	c, err := nftables.New(nftables.AsLasting(), nftables.WithSockOptions(func(c *netlink.Conn) error {
		raw = c
		return nil
	}))
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	return &tablesConn{nft: c, raw: raw}, nil
}

func (c *tablesConn) use(fn func(*nftables.Conn) error) error {
	if err := c.raw.SetDeadline(time.Now().Add(netlinkPatience)); err != nil {
		return fmt.Errorf("bound the kernel's time: %w", err)
	}
	return fn(c.nft)
}

// close waits, after deletions, for an RCU grace period (nft_rcv_nl_event): 5 to 40 ms measured.
func (c *tablesConn) close() error { return wrapIf(c.nft.CloseLasting(), "close nftables") }

// withTables runs fn with a connection of its own to the nftables of the calling thread's namespace.
func withTables(fn func(*nftables.Conn) error) error {
	c, err := dialTables()
	if err != nil {
		return err
	}
	return errors.Join(c.use(fn), c.close())
}

// tables runs fn with the connection that the space keeps, because closing one takes longer than a fork may. After an
// error, which may leave answers behind in it, the next call makes a new one.
func (s *space) tables(fn func(*nftables.Conn) error) error {
	return s.nfnetlink(func(c *tablesConn) error { return c.use(fn) })
}

func (s *space) nfnetlink(fn func(*tablesConn) error) error {
	s.nftMu.Lock()
	defer s.nftMu.Unlock()
	if s.nft == nil {
		if err := s.inside(func() (err error) {
			s.nft, err = dialTables()
			return err
		}); err != nil {
			return err
		}
	}
	if err := fn(s.nft); err != nil {
		return errors.Join(err, s.hangUpLocked())
	}
	return nil
}

func (s *space) hangUpLocked() error {
	if s.nft == nil {
		return nil
	}
	c := s.nft
	s.nft = nil
	return c.close()
}

// ownSockets is how many sockets the space itself keeps inside the namespace.
func (s *space) ownSockets() int {
	s.nftMu.Lock()
	defer s.nftMu.Unlock()
	if s.nft == nil {
		return 0
	}
	return 1
}

// forgetConnections empties the namespace's connection tracking.
func (s *space) forgetConnections() error {
	err := s.nfnetlink(func(c *tablesConn) error {
		return c.use(func(*nftables.Conn) error {
			_, err := c.raw.Execute(netlink.Message{
				Header: netlink.Header{
					Type:  unix.NFNL_SUBSYS_CTNETLINK<<8 | ctDelete,
					Flags: netlink.Request | netlink.Acknowledge,
				},
				Data: make([]byte, 4), // struct nfgenmsg: any family, no filter
			})
			return err
		})
	})
	return wrapIf(err, "flush connection tracking")
}

const ctDelete = 2 // IPCTNL_MSG_CT_DELETE
