package assemble

import (
	"slices"

	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// lossSlack is added to the time after which the kernel sends again what is not
// acknowledged: its timers are coarse, and its records are read some 25 ms late.
const lossSlack = uint64(100e6) // nanoseconds

// An unproven request is whole: its last byte has reached the device. If bytes of
// the response prove to be lost it ends later, when they are acknowledged.
type unproven struct {
	cookie  uint64
	request *request
}

// prove finishes a request that is whole, once it is sure that no bytes of it were
// lost: the client goes on to the next request or is gone, or the time is over
// after which the kernel would have sent them again.
func (a *Assembler) prove(cookie uint64, c *conn) {
	r := c.request
	if r.until != 0 {
		return
	}
	if !r.measured || r.last.Unacked == 0 || slices.Contains(a.cfg.Unavailable, stage.Retransmit) {
		a.finish(c)
		return
	}
	a.leave(r) // what its thread does now is no part of it
	r.until = r.last.Time + r.last.Unacked + lossSlack
	a.unproven = append(a.unproven, unproven{cookie, r})
}

// finishProven finishes the unproven requests whose time is over.
func (a *Assembler) finishProven() {
	a.unproven = slices.DeleteFunc(a.unproven, func(u unproven) bool {
		c := a.conns[u.cookie]
		switch {
		case c == nil || c.request != u.request:
			return true // finished already
		case u.request.losing() || a.now < u.request.until:
			return false
		}
		a.finish(c)
		return true
	})
}

// retransmit notes that bytes of a response were sent again, or that this is
// over.
func (a *Assembler) retransmit(e *probe.Retransmit) {
	c := a.conns[e.Cookie]
	if c == nil || c.request == nil || c.request.Seq != e.Seq || !c.request.begun {
		if !e.Over {
			a.unparsed["retransmitted_late"]++ // its request has been given on as whole
		}
		return
	}
	r := c.request
	c.heard = e.Time
	a.hear(r, e.Time)
	if e.Spurious {
		// nothing was lost: what readings took for the loss's was the client's
		p := &r.last
		if d := p.Exclusive[stage.Retransmit] - r.lostBefore; d > 0 {
			p.Exclusive[stage.Retransmit] -= d
			p.Exclusive[stage.SendBuffer] += d
		}
		p.Plain[stage.Retransmit] = e.Plain
		p.Retransmits = max(p.Retransmits, e.Retransmits)
		r.loss = probe.Retransmit{}
		if r.until != 0 {
			a.finish(c)
		}
		return
	}
	r.loss = *e
	if e.Over {
		r.lostBefore = r.last.Exclusive[stage.Retransmit]
	}
	if e.Over && r.until != 0 {
		a.finish(c)
	}
}

// losing tells whether bytes of the response that were sent again are not
// acknowledged yet.
func (r *request) losing() bool { return r.loss.Retransmits > 0 && !r.loss.Over }

// settleLoss moves the end of a response that was sent again, in part, to the
// acknowledgement. Since the last byte reached the device nothing else happened:
// all of the time from then on is the loss's.
func (r *request) settleLoss() {
	p := &r.last
	r.Retransmits = int(max(p.Retransmits, r.loss.Retransmits))
	if r.loss.Retransmits == 0 {
		return
	}
	p.Plain[stage.Retransmit] = max(p.Plain[stage.Retransmit], r.loss.Plain)
	if !r.loss.Over || r.loss.Time <= p.Time {
		return
	}
	p.Exclusive[stage.Retransmit] += int64(r.loss.Time - p.Time)
	p.Time = r.loss.Time
}
