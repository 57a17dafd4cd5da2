// Package netns owns the network of one sandbox: a namespace with a tap and no way out, its
// addresses and its nftables rules. Namespaces are made in advance in a pool, reset and recycled.
// The package does not know VMMs, guests or egress names.
//
// # What a namespace holds
//
// A namespace has lo (down), tap0 (down until [Namespace.Open]) with the gateway's address, and two
// tables named coppice. There is no veth and no route except the one to the guest, so a packet that
// no rule stopped still has nowhere to go. Permitted traffic passes through sockets that were
// opened inside and are used outside: [Namespace.Dial] for forwarded ports,
// [Namespace.EgressSockets] for the separate egress process. A veth exists only for
// core.EgressAllowAll.
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
// In quarantined and assigned the tap is down: VMMs announce the captured MAC by RARP when they
// resume, and an observer on the tap sees that even if a rule drops it. Behind the tap every chain
// drops as well, so a tap that came up by mistake leaks nothing.
//
// # Rules
//
// [rulesFor] turns a plan (state, guest MAC and IP, policy, service ports) into a ruleset as data.
// One function prints it as nft would, another compiles it for the kernel. A ruleset is applied as
// one netlink batch, which the kernel takes as a whole or not at all, then read back and compared.
// [Namespace.Check] compares it again at any later time, and closes a namespace whose rules
// somebody else has changed. The plan is stored as the comment of a rule. After a restart,
// [Pool.Adopt] restores a namespace from it and compares every rule again.
//
// # Recycling
//
// A namespace costs little to make, but the kernel serialises its removal. So released namespaces
// are reset: sockets and connection tracking are removed, tap and tables are deleted and made again
// (the VMM held the tap's descriptor and could have changed anything about it), and then every item
// is verified. A namespace that cannot be verified is deleted.
//
// # Names
//
// Every name has a hash of the cluster id and its own id: namespaces are coppice-HASH-ID in
// /run/netns (where ip-netns(8) shows them), the veth of allow-all is cpHASHID and its table on the
// host coppice_HASH_ID. [Pool.Reconcile] uses only these names, so two installations on one machine
// never reap each other.
//
// # Threads
//
// Work inside a namespace runs on an OS thread that enters it and ends with the work
// (internal/osthread). So no goroutine ever finds itself in a sandbox's network. That costs 40 µs
// each time.
package netns
