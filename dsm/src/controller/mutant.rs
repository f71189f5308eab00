//! Broken controllers, which prove that the judges of the simulator can fail.

/// Ways to be wrong on purpose: the simulator must find each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mutant {
    /// Takes a page although it is pinned.
    IgnorePins,
    /// Pins a page that waits for its pins to go.
    PinDeferred,
    /// Extends a visit while users pin its page in turns.
    ExtendVisit,
    /// Does not wait until the users gave the page up.
    RevokeLate,
    /// Leaves the right as it was while the users give the page up.
    KeepRight,
    /// Looks at messages about a page in transition at once.
    NoQueue,
    /// Forgets what queued up behind an operation.
    ForgetQueue,
    /// Looks at the youngest message about a page first.
    QueueBackwards,
    /// Maps a page while it is being taken.
    MapInTransition,
    /// Wakes no waiting thread when its page comes.
    ForgetWaiter,
    /// Forgets a request that waits for room.
    ForgetRoomWait,
    /// Gives memory back of pages that are in use.
    GiveBackUsed,
    /// Does not put pages in transition while their memory is given back.
    GiveBackAnyTime,
    /// Never waits for room.
    NoBudget,
    /// Lets the page that a write elsewhere took be read on.
    KeepOutdated,
    /// Asks again for a page that no user looks at, for ever.
    NeverUnsubscribe,
    /// Does not say that a page which a user waits for is lost.
    ForgetLoss,
    /// A death changes no page in transition.
    LossSkipsTransitions,
    /// A death overtakes what queued up behind an operation.
    LossOvertakes,
    /// Goes on waiting for the answers of a dead node to offers.
    KeepOffers,
    /// A page that its visitor may still write is not given to others, for ever.
    StayForEver,
    /// Hands over entries of pages in transition, and evicts such pages.
    DrainInTransition,
    /// Finds no mention of a node that leaves.
    ForgetMentions,
    /// Is quiet at once.
    QuietEarly,
    /// Requests as many pages while users wait as while none does.
    PrefetchWhileWaiting,
    /// Requests all pages of a prefetch at once.
    PrefetchAllAtOnce,
    /// Prefetches pages for which others must leave.
    PrefetchBeyondRoom,
    /// Prefetches while prefetches are held.
    PrefetchWhileHeld,
    /// Prefetches for users that left.
    PrefetchForEver,
    /// The clock goes by the managers of the configuration.
    KeepHomes,
    /// Uses a pre-copy of a page that was written since.
    PrecopyAfterWrite,
    /// Gives memory back that is filled with a pre-copy.
    PrecopyGivenBack,
    /// Uses a pre-copy that the other node may have refused.
    PrecopyUnanswered,
    /// Takes a page from a thread that writes it, to send it ahead.
    PrecopyIgnoresPins,
    /// Sends a page ahead while users may write it.
    PrecopyUnprotected,
    /// Keeps pre-copies that were dropped.
    PrecopyForEver,
    /// Says that it is at rest while a page is in transition.
    RestInTransition,
    /// Says so while a user has a page pinned.
    RestPinned,
    /// Goes on with evictions while it rests.
    RestEvicts,
    /// Goes on with its drain.
    RestDrains,
    /// Goes on with its pre-copy.
    RestPrecopies,
    /// Requests what users ask for.
    RestRequests,
    /// Has copies written to a checkpoint, too.
    SaveCopies,
    /// Has the pages written that it manages, as they are here.
    SaveManaged,
    /// Lets users go on writing pages that are unsaved.
    SaveWritable,
    /// Lets users write a page for the first time before it is saved.
    SaveAfterAllow,
    /// Gives users the right back to write a page before it is saved.
    SaveAfterReturn,
    /// Gives a page to another node before it is saved.
    SaveAfterGive,
    /// Copies more pages than there are buffers.
    SaveUnbounded,
    /// Has steps wait for a buffer for ever.
    SaveNeverDropped,
    /// Leaves pages out of a save that have changed since the last one.
    SaveCleanForEver,
    /// Gives a page to another node that is absent.
    GiveAbsent,
    /// Lets users use a page that is absent.
    AllowAbsent,
    /// Lets users write a page that was read from a file, as if it had changed.
    LoadWritable,
    /// Does not learn of pages that go from one node to another.
    RelocateUntold,
}
