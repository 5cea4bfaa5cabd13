//go:build linux

package probe

import (
	"errors"
	"fmt"
	"time"

	"github.com/ebpfllm/ebpfllm/bpf"
)

// Counters are cumulative since New.
type Counters struct {
	Sent    map[string]uint64 // made by the kernel side, by kind: read from the ring, lost, or still in it
	Records map[string]uint64 // read from the ring, by kind
	Lost    map[string]uint64 // by reason
	MapFull map[string]uint64 // by map
	// Missed is how often a program was not run because it was running on that CPU already, by program. Whose
	// moment that was is not known. The kernel does not count it of perf events, and of tracepoints from 6.1 on.
	Missed     map[string]uint64
	Unreadable uint64 // heads read by a call whose buffer is not known
	// LooseAccepts are connections whose accept is known to no better than a
	// millisecond; which side of it the wait was charged to is a guess.
	LooseAccepts uint64
	// Unwatched are requests that came to watched processes by ways that are not
	// measured, by way.
	Unwatched  map[string]uint64
	Targets    int // tracked processes that are no candidates
	Candidates int
}

// The kernel side counts by the same kinds.
var sentKinds = map[bpf.KernelCounter]eventKind{
	bpf.KernelCounterSENT_REQUEST_HEAD:  kindRequestHead,
	bpf.KernelCounterSENT_RESPONSE_HEAD: kindResponseHead,
	bpf.KernelCounterSENT_PROGRESS:      kindProgress,
	bpf.KernelCounterSENT_OCCURRENCE:    kindOccurrence,
	bpf.KernelCounterSENT_CLOSE:         kindClose,
	bpf.KernelCounterSENT_RETRANSMIT:    kindRetransmit,
	bpf.KernelCounterSENT_PROCESS:       kindProcess,
}

var lostReasons = map[bpf.KernelCounter]string{
	bpf.KernelCounterLOST_REQUEST_HEAD:  "ring_full_request_head",
	bpf.KernelCounterLOST_RESPONSE_HEAD: "ring_full_response_head",
	bpf.KernelCounterLOST_PROGRESS:      "ring_full_progress",
	bpf.KernelCounterLOST_OCCURRENCE:    "ring_full_occurrence",
	bpf.KernelCounterLOST_CLOSE:         "ring_full_close",
	bpf.KernelCounterLOST_PROCESS:       "ring_full_process",
	bpf.KernelCounterLOST_RETRANSMIT:    "ring_full_retransmit",
}

var fullMaps = map[bpf.KernelCounter]string{
	bpf.KernelCounterFULL_LANES:     "lanes",
	bpf.KernelCounterFULL_THREADS:   "threads",
	bpf.KernelCounterFULL_PROCESSES: "processes",
	bpf.KernelCounterFULL_SOCKETS:   "conns",
	bpf.KernelCounterFULL_PORTS:     "ports",
}

var unwatched = map[bpf.KernelCounter]string{
	bpf.KernelCounterREQUESTS_UNIX:  "unix_socket",
	bpf.KernelCounterREQUESTS_MPTCP: "mptcp",
}

// Counters reads what was received and what was lost, every reason named even
// at zero.
func (p *Probe) Counters() (Counters, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := Counters{
		Sent: map[string]uint64{}, Records: map[string]uint64{}, Lost: map[string]uint64{"invalid": p.invalid.Load()},
		MapFull: map[string]uint64{}, Unwatched: map[string]uint64{}, Missed: map[string]uint64{},
	}
	if p.closed {
		return c, errors.New("read the counters: the probe is closed")
	}
	for kind, name := range kindNames {
		c.Records[name] = p.records[kind].Load()
	}
	for name, program := range p.objects.Programs {
		s, err := program.Stats()
		if err != nil {
			return c, fmt.Errorf("read what program %s has missed: %w", name, err)
		}
		c.Missed[name] = s.RecursionMisses
	}
	for _, t := range p.processes {
		if t.Candidate {
			c.Candidates++
		} else {
			c.Targets++
		}
	}
	for counter := range bpf.KernelCounterCOUNTERS {
		var perCPU []uint64
		if err := p.objects.Maps["counters"].Lookup(uint32(counter), &perCPU); err != nil {
			return c, fmt.Errorf("read counter %d: %w", counter, err)
		}
		var sum uint64
		for _, n := range perCPU {
			sum += n
		}
		if kind, ok := sentKinds[counter]; ok {
			c.Sent[kindNames[kind]] = sum
			continue
		}
		switch {
		case lostReasons[counter] != "":
			c.Lost[lostReasons[counter]] = sum
		case fullMaps[counter] != "":
			c.MapFull[fullMaps[counter]] = sum
		case unwatched[counter] != "":
			c.Unwatched[unwatched[counter]] = sum
		case counter == bpf.KernelCounterHEADS_UNREADABLE:
			c.Unreadable = sum
		case counter == bpf.KernelCounterACCEPTS_LOOSE:
			c.LooseAccepts = sum
		}
	}
	return c, nil
}

// Runs is how often a program has run, and for how long in all.
type Runs struct {
	Count uint64
	Time  time.Duration
}

// Runs tells of each program, while the kernel counts
// (kernel.bpf_stats_enabled, or ebpf.EnableStats).
func (p *Probe) Runs() map[string]Runs {
	p.mu.Lock()
	defer p.mu.Unlock()
	runs := map[string]Runs{}
	if p.closed {
		return runs
	}
	for name, program := range p.objects.Programs {
		if s, err := program.Stats(); err == nil {
			runs[name] = Runs{s.RunCount, s.Runtime}
		}
	}
	return runs
}

// eventKind tells events apart as the counters do.
type eventKind int

const (
	kindRequestHead eventKind = iota
	kindResponseHead
	kindProgress
	kindOccurrence
	kindClose
	kindRetransmit
	kindProcess
	eventKinds
)

var kindNames = [eventKinds]string{"request_head", "response_head", "progress", "occurrence", "close", "retransmit", "process"}

func kindOf(e Event) eventKind {
	switch e.(type) {
	case *RequestHead:
		return kindRequestHead
	case *ResponseHead:
		return kindResponseHead
	case *Progress:
		return kindProgress
	case *Occurrence:
		return kindOccurrence
	case *Close:
		return kindClose
	case *Retransmit:
		return kindRetransmit
	}
	return kindProcess
}
