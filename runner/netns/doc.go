// Package netns owns the network of one sandbox: a namespace with a tap and no way out, its addresses and its
// nftables rules, made warm in a pool, reset and recycled. It does not know VMMs, guests or egress names.
//
// # What a namespace holds
//
// lo (down), tap0 (down until [Namespace.Open]) with the gateway's address, and two tables named coppice. There is
// no veth and no route but the one to the guest, so a packet that no rule stopped still has nowhere to go. What must
// get through gets through by sockets that were opened inside and are used outside: [Namespace.Dial] for forwarded
// ports, [Namespace.EgressSockets] for the egress proxy of a process of its own. A veth exists only for core.EgressAllowAll.
//
// # States
//
//	            Assign              Open
//	quarantined ──────▶ assigned ──────────▶ open
//	     ▲   ▲              │                 │
//	     │   └─────Shut─────┴──────Shut───────┤
//	   reset                                  │
//	     └── returned ◀────────Release────────┘ (from any state)
//
// In quarantined and assigned the tap is down: VMMs announce the captured MAC by RARP when they resume, and an
// observer on the tap sees that even when a rule drops it. Behind the tap every chain drops as well, so a tap that
// came up by mistake leaks nothing.
//
// # Rules
//
// [rulesFor] turns a plan (state, guest MAC and IP, policy, service ports) into a ruleset as data; one function
// prints it as nft would, another compiles it for the kernel. A ruleset is applied as one netlink batch, which the
// kernel takes whole or not at all, then read back and compared. [Namespace.Check] compares it again at any time later,
// and closes a namespace whose rules were changed by somebody else. The plan is stored as the comment of a rule, from
// which [Pool.Adopt] restores a namespace after a restart, again comparing every rule.
//
// # Recycling
//
// A namespace costs little to make but its removal is serialised in the kernel, so released ones are reset: sockets
// and connection tracking gone, tap and tables deleted and made anew (the VMM held the tap's descriptor and could
// have changed anything about it), then verified item by item. What cannot be verified is deleted.
//
// # Names
//
// Everything carries a hash of the cluster id and one id of its own: namespaces are coppice-HASH-ID in /run/netns
// (where ip-netns(8) shows them), the veth of allow-all is cpHASHID and its table on the host coppice_HASH_ID.
// [Pool.Reconcile] goes by these names alone, so two installations on one machine never reap each other.
//
// # Threads
//
// Work inside a namespace runs on an OS thread that enters it and ends with the work (internal/osthread), so no
// goroutine ever finds itself in a sandbox's network. That costs 40 µs each time.
package netns
