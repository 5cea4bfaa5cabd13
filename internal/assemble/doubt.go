package assemble

import "slices"

// Of records that found no room in the ring only their number is known. What
// ended with one of them, a request or a connection, is held to go on here. So
// once a loss is told, whatever has not been heard of since is in doubt: it may
// be over, and is nobody's companion until it is heard of again.

// Bounds of what is in doubt, in nanoseconds.
const (
	doubtfulAfter = StaleAfter / 6 // a connection that is silent for so long is forgotten
	idleAfter     = StaleAfter / 60
	crowdedAfter  = uint64(10e9) // the same where there is no room for another one
)

// Lost says that records were lost before a time (CLOCK_MONOTONIC nanoseconds),
// whichever they were.
func (a *Assembler) Lost(before uint64) { a.lostAt = max(a.lostAt, before) }

func (a *Assembler) doubtful(r *request) bool { return r.heard <= a.lostAt }

// hear is told that an event was the request's own.
func (a *Assembler) hear(r *request, at uint64) {
	doubtful := a.doubtful(r)
	r.heard = max(r.heard, at)
	if doubtful && !a.doubtful(r) {
		a.count(r.lane) // it is there after all
	}
}

// known are those of the requests that are not in doubt.
func (a *Assembler) known(requests []*request) []*request {
	if !slices.ContainsFunc(requests, a.doubtful) {
		return requests
	}
	return slices.DeleteFunc(slices.Clone(requests), a.doubtful)
}

// patience is for how long a connection may be silent, in nanoseconds, before it is
// forgotten.
func (a *Assembler) patience(c *conn) uint64 {
	switch {
	case c.heard > a.lostAt:
		return StaleAfter
	case c.request == nil && !c.ignored:
		return idleAfter
	}
	return doubtfulAfter
}

// makeRoom forgets connections in doubt, as far as they have been silent for a while,
// and tells whether there is room for another one at a time.
func (a *Assembler) makeRoom(now uint64) bool {
	if len(a.conns) < MaxConnections {
		return true
	}
	if a.lostAt == 0 || now < a.crowded+crowdedAfter {
		return false
	}
	a.crowded = now
	a.forget(now, func(c *conn) uint64 {
		if c.heard <= a.lostAt {
			return crowdedAfter
		}
		return StaleAfter
	})
	return len(a.conns) < MaxConnections
}

// forget forgets connections that have been silent for longer than their patience. A
// request that is in flight there is given on as it stands.
func (a *Assembler) forget(now uint64, patience func(*conn) uint64) {
	for cookie, c := range a.conns {
		if c.heard+patience(c) > now {
			continue
		}
		if r := c.request; r != nil {
			if a.doubtful(r) {
				r.problem(IncompleteLost)
			}
			r.problem(IncompleteStale)
			a.finish(c)
		}
		delete(a.conns, cookie)
	}
}
