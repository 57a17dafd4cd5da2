package checkpoints

import "testing"

func TestRebasePolicy(t *testing.T) {
	t.Parallel()
	const mib = 1 << 20
	standard := carried{delta: 10 * mib, base: 110 * mib, forks: 1, room: 16 << 30}
	for name, c := range map[string]struct {
		policy RebasePolicy
		change func(*carried)
		want   bool
	}{
		"first fork of a small delta":          {},
		"not enough forks":                     {change: func(c *carried) { c.forks = 11 }},
		"forks carry as much as a base":        {change: func(c *carried) { c.forks = 12 }, want: true},
		"nothing to rebase":                    {change: func(c *carried) { c.delta, c.forks = 0, 1000 }},
		"first fork of a large delta":          {change: func(c *carried) { c.delta = 64 * mib }, want: true},
		"a large delta nobody forked":          {change: func(c *carried) { c.delta, c.forks = 64*mib, 0 }},
		"just below a large delta":             {change: func(c *carried) { c.delta = 64*mib - 4096 }},
		"a large delta on a host without room": {change: func(c *carried) { c.delta, c.room = 64*mib, 4*174*mib-1 }},
		"a large delta that just fits":         {change: func(c *carried) { c.delta, c.room = 64*mib, 4*174*mib }, want: true},
		"many forks on a host without room":    {change: func(c *carried) { c.forks, c.room = 100, 400*mib }},
		"off":                                  {policy: RebasePolicy{Off: true}, change: func(c *carried) { c.delta, c.forks = 500*mib, 1000 }},
		"another size":                         {policy: RebasePolicy{DeltaBytes: 10 * mib}, want: true},
		"another factor":                       {policy: RebasePolicy{Carried: 1.0 / 12}, want: true},
		"all of the host":                      {policy: RebasePolicy{Room: 1}, change: func(c *carried) { c.delta, c.room = 64*mib, 174*mib }, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			in := standard
			if c.change != nil {
				c.change(&in)
			}
			if got := c.policy.withDefaults().wants(in); got != c.want {
				t.Errorf("wants %v for %+v, want %v", got, in, c.want)
			}
		})
	}
}

func TestAvailableMemory(t *testing.T) {
	t.Parallel()
	n, err := availableMemory()
	if err != nil || n <= 0 {
		t.Errorf("the available memory is %d, %v", n, err)
	}
}
