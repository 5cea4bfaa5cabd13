package baseline

import (
	"bytes"
	"encoding/binary"
	"encoding/gob"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"slices"
	"time"

	"github.com/DataDog/sketches-go/ddsketch"
	"github.com/DataDog/sketches-go/ddsketch/store"
)

// ErrDamaged says that what was saved cannot be read back.
var ErrDamaged = errors.New("saved baseline is damaged")

// Key names a group.
type Key struct{ Service, Operation string }

// Clock is where a book is in time. It has to be restored before its groups.
type Clock struct {
	Window  time.Duration
	Rotated time.Time // start of the current slice
	Slice   uint32
}

type savedGroup struct {
	Key    Key
	Series []savedSeries
}

type savedSeries struct {
	Stage     string
	AskParent bool
	Parts     []savedPart
}

type savedPart struct {
	Slice                       uint32
	Learned, Deferred, Excluded []byte // sketches
	N, NLater, NOut             int
}

// Clock returns where the book is in time.
func (b *Book) Clock() Clock { return Clock{b.cfg.Window, b.rotated, b.slice} }

// SetClock takes an empty book to where another was. It refuses one of another
// window: its slices are of another length. What is in the future counts as now.
func (b *Book) SetClock(c Clock, now time.Time) error {
	if c.Window != b.cfg.Window {
		return fmt.Errorf("the saved baseline has a window of %v, not %v", c.Window, b.cfg.Window)
	}
	if c.Slice < nSlices {
		return fmt.Errorf("%w: slice %d", ErrDamaged, c.Slice)
	}
	b.rotated, b.slice = c.Rotated, c.Slice
	if now.Before(b.rotated) {
		b.rotated = now
	}
	return nil
}

// Keys returns the groups, the least recently used first.
func (b *Book) Keys() []Key {
	keys := make([]Key, 0, len(b.groups))
	for e := b.lru.Back(); e != nil; e = e.Prev() {
		k := e.Value.(*Group).key
		keys = append(keys, Key{k.service, k.operation})
	}
	return keys
}

// Save returns a group as bytes, nil if it is gone or nothing has changed since it
// was last saved.
func (b *Book) Save(k Key) ([]byte, error) {
	g, ok := b.groups[groupKey{k.Service, k.Operation}]
	if !ok {
		return nil, nil
	}
	saved := savedGroup{Key: k}
	state := g.state()
	if state == g.saved {
		return nil, nil
	}
	for _, name := range slices.Sorted(maps.Keys(g.series)) {
		s := g.series[name]
		one := savedSeries{Stage: name, AskParent: s.parent != nil}
		for i := range s.ring {
			if p := &s.ring[i]; s.live(p) {
				one.Parts = append(one.Parts, savedPart{p.slice, encode(p.learned), encode(p.deferred), encode(p.excluded), p.n, p.nLater, p.nOut})
			}
		}
		saved.Series = append(saved.Series, one)
	}
	var buf bytes.Buffer
	if err := gob.NewEncoder(&buf).Encode(saved); err != nil {
		return nil, fmt.Errorf("encoding the baseline of %s %s: %w", k.Service, k.Operation, err)
	}
	g.saved = state
	return binary.BigEndian.AppendUint32(buf.Bytes(), crc32.ChecksumIEEE(buf.Bytes())), nil
}

// Load puts a saved group into the book. One that is damaged changes nothing.
func (b *Book) Load(data []byte) error {
	if len(data) < 4 {
		return fmt.Errorf("%w: %d bytes", ErrDamaged, len(data))
	}
	body, sum := data[:len(data)-4], binary.BigEndian.Uint32(data[len(data)-4:])
	if crc32.ChecksumIEEE(body) != sum {
		return fmt.Errorf("%w: wrong checksum", ErrDamaged)
	}
	var saved savedGroup
	if err := gob.NewDecoder(bytes.NewReader(body)).Decode(&saved); err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	g := b.Group(saved.Key.Service, saved.Key.Operation)
	for _, one := range saved.Series {
		s := g.Series(one.Stage, one.AskParent)
		for _, p := range one.Parts {
			loaded := part{slice: p.Slice, n: p.N, nLater: p.NLater, nOut: p.NOut}
			if err := errors.Join(decode(p.Learned, &loaded.learned), decode(p.Deferred, &loaded.deferred), decode(p.Excluded, &loaded.excluded)); err != nil {
				return fmt.Errorf("%w: %s %s %s: %w", ErrDamaged, saved.Key.Service, saved.Key.Operation, one.Stage, err)
			}
			s.ring[p.Slice%nSlices] = loaded
		}
		s.cache = summary{}
	}
	return nil
}

// state is a number that changes with the group's values.
func (g *Group) state() (n int) {
	for _, name := range slices.Sorted(maps.Keys(g.series)) {
		s := g.series[name]
		for i := range s.ring {
			p := &s.ring[i]
			n = n*31 + int(p.slice)<<8 + p.n + 3*p.nLater + 7*p.nOut
		}
	}
	return n
}

func encode(s sketch) []byte {
	if s == nil {
		return nil
	}
	var b []byte
	s.Encode(&b, true)
	return b
}

func decode(b []byte, s *sketch) error {
	if len(b) == 0 {
		return nil
	}
	d, err := ddsketch.DecodeDDSketch(b, store.DenseStoreConstructor, buckets)
	*s = d
	return err
}
