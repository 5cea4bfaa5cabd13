//go:build linux

package link

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Path is one direction's behaviour.
type Path struct {
	Delay  time.Duration // from one end to the other, beside what Rate makes of it
	Jitter time.Duration // added to Delay, evenly between 0 and this; packets stay in order
	Rate   int64         // bits per second; 0: no limit
	Buffer int           // bytes that may wait for Rate; what comes when it is full is dropped. 0: no limit but that of the forwarder
	Loss   float64       // share of packets that are dropped, 0 to 1
}

// Stats count a direction's packets. Those that are not IPv4 are no one's.
type Stats struct {
	Packets, Bytes int // delivered
	Lost           int // by Path.Loss
	Chosen         int // by Drop
	Full           int // for want of Buffer
	Failed         int // not taken by the receiving device
}

// maxQueued bounds what a direction holds, in bytes.
const maxQueued = 64 << 20

// path carries one direction's packets. Its owner is the forwarder's goroutine,
// which holds the link's lock meanwhile.
type path struct {
	Path
	to    int // descriptor of the receiving device
	stats Stats

	queue  []packet // in order of due
	queued int      // bytes in queue
	sent   time.Time
	due    time.Time

	drops []drop
	data  map[uint16]time.Time // by the port that it is sent to: when the latest data came from the sender
}

// drop is an order to drop segments.
type drop struct {
	text []byte // that their data contain
	n    int    // how many yet
}

type packet struct {
	due  time.Time
	data []byte
}

// take accepts a packet at its sender's end, and tells whether it keeps it.
func (p *path) take(data []byte, now time.Time) bool {
	if len(data) < 20 || data[0]>>4 != 4 {
		return false
	}
	if segment, carried := tcpSegment(data); len(carried) > 0 {
		if p.data == nil {
			p.data = map[uint16]time.Time{}
		}
		p.data[binary.BigEndian.Uint16(segment[2:])] = now
	}
	if p.chosen(data) {
		p.stats.Chosen++
		return false
	}
	if p.Loss > 0 && rand.Float64() < p.Loss { //nolint:gosec // chance, not secrecy
		p.stats.Lost++
		return false
	}
	sent := now
	if p.Rate > 0 {
		if p.sent.After(now) {
			sent = p.sent
			if waiting := sent.Sub(now).Seconds() * float64(p.Rate) / 8; p.Buffer > 0 && waiting+float64(len(data)) > float64(p.Buffer) {
				p.stats.Full++
				return false
			}
		}
		sent = sent.Add(p.carry(len(data)))
	}
	if p.queued+len(data) > maxQueued {
		p.stats.Full++
		return false
	}
	p.sent = sent
	due := sent.Add(p.Delay)
	if p.Jitter > 0 {
		due = due.Add(rand.N(p.Jitter)) //nolint:gosec // chance, not secrecy
	}
	if due.Before(p.due) {
		due = p.due
	}
	p.due = due
	p.queue = append(p.queue, packet{due, bytes.Clone(data)})
	p.queued += len(data)
	return true
}

// carry is how long the narrow place is busy with so many bytes.
func (p *path) carry(bytes int) time.Duration {
	return time.Duration(float64(bytes*8) / float64(p.Rate) * float64(time.Second))
}

// occupy has the narrow place carry bytes that are nobody's here.
func (p *path) occupy(bytes int, now time.Time) {
	if p.Rate <= 0 {
		return
	}
	if p.sent.Before(now) {
		p.sent = now
	}
	p.sent = p.sent.Add(p.carry(bytes))
}

// next is how long until a packet is due; false if none is on the way.
func (p *path) next(now time.Time) (time.Duration, bool) {
	if len(p.queue) == 0 {
		return 0, false
	}
	return max(0, p.queue[0].due.Sub(now)), true
}

// deliver hands over what is due.
func (p *path) deliver(now time.Time) {
	n := 0
	for ; n < len(p.queue) && !p.queue[n].due.After(now); n++ {
		data := p.queue[n].data
		p.queued -= len(data)
		if _, err := unix.Write(p.to, data); err != nil {
			p.stats.Failed++
			continue
		}
		p.stats.Packets++
		p.stats.Bytes += len(data)
	}
	clear(p.queue[:n])
	p.queue = p.queue[n:]
}

// chosen tells whether a packet is to be dropped by order, and notes that it is.
func (p *path) chosen(packet []byte) bool {
	_, carried := tcpSegment(packet)
	for i := range p.drops {
		if !bytes.Contains(carried, p.drops[i].text) {
			continue
		}
		if p.drops[i].n--; p.drops[i].n <= 0 {
			p.drops = slices.Delete(p.drops, i, i+1)
		}
		return true
	}
	return false
}

// tcpSegment is what an IPv4 packet carries, if it is a TCP segment, and what that carries.
func tcpSegment(packet []byte) (segment, data []byte) {
	head := int(packet[0]&0xf) * 4
	if packet[9] != unix.IPPROTO_TCP || len(packet) < head+20 {
		return nil, nil
	}
	segment = packet[head:]
	return segment, segment[min(len(segment), int(segment[12]>>4)*4):]
}
