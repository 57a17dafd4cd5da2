// Package mode holds one switch of package confine that only its test helper can reach.
package mode

import "sync/atomic"

// WithoutRoot lets a user other than root start helpers, without namespaces and without a user of their own. Only package
// confinetest sets it. That package links package testing, and no program that is shipped may link that.
var WithoutRoot atomic.Bool
