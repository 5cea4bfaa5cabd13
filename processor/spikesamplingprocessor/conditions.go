package spikesamplingprocessor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"

	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/ottl"
	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/ottl/contexts/ottlspan"
	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/ottl/contexts/ottlspanevent"
	"github.com/open-telemetry/opentelemetry-collector-contrib/pkg/ottl/ottlfuncs"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

// condition is the part of a policy that looks at single spans. It is asked
// outside the lock while a span is still whole, by several goroutines at once;
// its answer is one bit of what the trace remembers.
type condition struct {
	bit    uint64
	policy string
	match  func(rs ptrace.ResourceSpans, ss ptrace.ScopeSpans, span ptrace.Span) (bool, error)
	errors atomic.Int64 // since the last report: spans that it could not be asked of
	last   atomic.Pointer[error]
}

// ask tells whether the span meets the condition. One that cannot be evaluated,
// such as a comparison of a string with a number, is not met, and is counted.
func (c *condition) ask(rs ptrace.ResourceSpans, ss ptrace.ScopeSpans, span ptrace.Span) bool {
	ok, err := c.match(rs, ss, span)
	if err != nil {
		c.errors.Add(1)
		c.last.Store(&err)
	}
	return ok
}

// attributeCondition is met by a span that has the attribute itself or on its
// resource: with one of the values or, without any, with one that means yes.
func attributeCondition(cfg MustKeepConfig) func(ptrace.ResourceSpans, ptrace.ScopeSpans, ptrace.Span) (bool, error) {
	says := func(attrs pcommon.Map) bool {
		v, ok := attrs.Get(cfg.Attribute)
		switch {
		case !ok:
			return false
		case len(cfg.Values) > 0:
			return slices.Contains(cfg.Values, v.AsString())
		}
		switch v.Type() {
		case pcommon.ValueTypeBool:
			return v.Bool()
		case pcommon.ValueTypeInt:
			return v.Int() != 0
		default:
			yes, err := strconv.ParseBool(v.AsString())
			return err == nil && yes
		}
	}
	return func(rs ptrace.ResourceSpans, _ ptrace.ScopeSpans, span ptrace.Span) (bool, error) {
		return says(span.Attributes()) || says(rs.Resource().Attributes()), nil
	}
}

// ottlCondition is met by a span for which one of the conditions holds, or for
// one of whose events one does.
func ottlCondition(cfg OTTLConfig, set component.TelemetrySettings) (func(ptrace.ResourceSpans, ptrace.ScopeSpans, ptrace.Span) (bool, error), error) {
	spanParser, err := ottlspan.NewParser(withRoot(ottlfuncs.StandardConverters[*ottlspan.TransformContext]()), set, ottlspan.EnablePathContextNames())
	if err != nil {
		return nil, fmt.Errorf("setting up OTTL for spans: %w", err)
	}
	eventParser, err := ottlspanevent.NewParser(ottlfuncs.StandardConverters[*ottlspanevent.TransformContext](), set, ottlspanevent.EnablePathContextNames())
	if err != nil {
		return nil, fmt.Errorf("setting up OTTL for span events: %w", err)
	}
	spans, spanErr := parse(ottlspan.ContextName, spanParser, cfg.Span, set)
	events, eventErr := parse(ottlspanevent.ContextName, eventParser, cfg.SpanEvent, set)
	if err := errors.Join(spanErr, eventErr); err != nil {
		return nil, err
	}
	return func(rs ptrace.ResourceSpans, ss ptrace.ScopeSpans, span ptrace.Span) (bool, error) {
		ok, err := anyHolds(spans, func() *ottlspan.TransformContext { return ottlspan.NewTransformContext(rs, ss, span) })
		if ok || len(events) == 0 {
			return ok, err
		}
		for i, event := range span.Events().All() {
			ok, eventErr := anyHolds(events, func() *ottlspanevent.TransformContext {
				return ottlspanevent.NewTransformContext(rs, ss, span, event, ottlspanevent.WithEventIndex(int64(i)))
			})
			err = errors.Join(err, eventErr)
			if ok {
				return true, nil
			}
		}
		return false, err
	}, nil
}

func withRoot(funcs map[string]ottl.Factory[*ottlspan.TransformContext]) map[string]ottl.Factory[*ottlspan.TransformContext] {
	root := ottlfuncs.NewIsRootSpanFactory()
	funcs[root.Name()] = root
	return funcs
}

// parse compiles conditions. A path without a context is one of the given
// context, as in contrib's tail_sampling.
func parse[K interface{ Close() }](context string, parser ottl.Parser[K], conditions []string, set component.TelemetrySettings) ([]*ottl.Condition[K], error) {
	if len(conditions) == 0 {
		return nil, nil
	}
	collection, err := ottl.NewParserCollection(set, ottl.WithParserCollectionContext(context, &parser,
		ottl.WithConditionConverter(func(_ *ottl.ParserCollection[[]*ottl.Condition[K]], _ ottl.ConditionsGetter, parsed []*ottl.Condition[K]) ([]*ottl.Condition[K], error) {
			return parsed, nil
		})))
	if err != nil {
		return nil, fmt.Errorf("setting up OTTL for %s: %w", context, err)
	}
	return collection.ParseConditionsWithContext(context, ottl.NewConditionsGetter(conditions), true)
}

// anyHolds tells whether one of the conditions holds; if none does, what kept some
// from being evaluated.
func anyHolds[K interface{ Close() }](conditions []*ottl.Condition[K], in func() K) (bool, error) {
	if len(conditions) == 0 {
		return false, nil
	}
	ctx := in()
	defer ctx.Close()
	var errs error
	for _, c := range conditions {
		ok, err := c.Eval(context.Background(), ctx)
		if ok && err == nil {
			return true, nil
		}
		errs = errors.Join(errs, err)
	}
	return false, errs
}
